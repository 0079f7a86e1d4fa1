/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads tests/fixtures/real/NAME.txt: what llama.cpp computes for a real model. Each file's head
 * states the recipe; tools/fixtures/real_models.py made it.
 *
 *   struct real_fixture x;
 *   if (!real_fixture_read(&x, path)) ... not there or not in the format
 *   ... x.prompts[i].steps[k].id ...
 *   real_fixture_free(&x);
 *
 * Greedy text is compared by feeding the fixture's own tokens: at each step the best id must be
 * steps[k].id, unless real_step_is_tie. So one tie does not hide the steps after it.
 */
#ifndef SL_TESTS_SUPPORT_REAL_FIXTURE_H
#define SL_TESTS_SUPPORT_REAL_FIXTURE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct real_logit {
    int32_t id;
    float logit;
};

/* One greedy step: the two highest logits, best first. */
struct real_step {
    int32_t id;
    float logit;
    int32_t second_id;
    float second_logit;
};

struct real_prompt {
    char *text;
    int32_t *tokens; /* of the text, BOS included when the model adds it */
    int n_tokens;
    struct real_logit *top; /* after the prompt, best first */
    int n_top;
    struct real_step *steps; /* ends early after an end-of-generation token */
    int n_steps;
};

struct real_fixture {
    char model[128]; /* file name */
    uint64_t model_bytes;
    char text[128]; /* file name of the text of the perplexity */
    uint64_t text_bytes;
    char text_sha256[65];
    int32_t *text_tokens;
    int n_text_tokens;
    int n_ctx;
    int n_chunks;
    int n_scored;
    double perplexity;
    double *chunk_nll; /* [n_chunks] sums of -ln p */
    struct real_prompt *prompts;
    int n_prompts;
};

static inline bool real_step_is_tie(const struct real_step *step)
{
    return step->logit - step->second_logit < 0.05F;
}

static inline void real_fixture_free(struct real_fixture *x)
{
    for (int i = 0; i < x->n_prompts; i++) {
        free(x->prompts[i].text);
        free(x->prompts[i].tokens);
        free(x->prompts[i].top);
        free(x->prompts[i].steps);
    }
    free(x->prompts);
    free(x->chunk_nll);
    free(x->text_tokens);
    memset(x, 0, sizeof *x);
}

/* The text of a line with \n and \\ undone. */
static inline char *real_unescape(const char *line)
{
    char *text = malloc(strlen(line) + 1);
    char *to = text;
    for (const char *from = line; *from != '\0' && *from != '\n'; from++) {
        if (*from == '\\' && from[1] != '\0') {
            from++;
            *to++ = (char)(*from == 'n' ? '\n' : *from);
        } else {
            *to++ = *from;
        }
    }
    *to = '\0';
    return text;
}

/* "NAME N ID..." from after the name; NULL when it is not that. */
static inline int32_t *real_ids(const char *line, int *out_n)
{
    int used = 0;
    int n = 0;
    if (sscanf(line, "%d%n", &n, &used) != 1 || n <= 0) {
        return NULL;
    }
    int32_t *ids = calloc((size_t)n, sizeof *ids);
    for (int i = 0; i < n; i++) {
        line += used;
        if (sscanf(line, "%d%n", &ids[i], &used) != 1) {
            free(ids);
            return NULL;
        }
    }
    *out_n = n;
    return ids;
}

/* The lines of one prompt; false when the line is none of them or is broken. */
static inline bool real_prompt_line(struct real_prompt *p, const char *line)
{
    int used = 0;
    int n = 0;
    if (strncmp(line, "tokens ", 7) == 0 && p->tokens == NULL) {
        p->tokens = real_ids(line + 7, &p->n_tokens);
        return p->tokens != NULL;
    }
    if (sscanf(line, "top %d%n", &n, &used) == 1 && n > 0 && p->top == NULL) {
        p->top = calloc((size_t)n, sizeof *p->top);
        for (p->n_top = 0; p->n_top < n; p->n_top++) {
            struct real_logit *top = &p->top[p->n_top];
            line += used;
            if (sscanf(line, "%d %f%n", &top->id, &top->logit, &used) != 2) {
                return false;
            }
        }
        return true;
    }
    struct real_step step;
    if (sscanf(line, "step %d %f %d %f", &step.id, &step.logit, &step.second_id,
               &step.second_logit) != 4) {
        return false;
    }
    p->steps = realloc(p->steps, (size_t)(p->n_steps + 1) * sizeof *p->steps);
    p->steps[p->n_steps++] = step;
    return true;
}

static inline bool real_fixture_line(struct real_fixture *x, const char *line)
{
    int index = 0;
    int used = 0;
    double nll = 0.0;
    if (line[0] == '#' || line[0] == '\n') {
        return true;
    }
    if (sscanf(line, "model %127s %lu", x->model, &x->model_bytes) == 2) {
        return true;
    }
    /* A space in a scanf format matches nothing too: "text_tokens" would pass. */
    if (strncmp(line, "text ", 5) == 0 &&
        sscanf(line, "text %127s %lu %64s", x->text, &x->text_bytes, x->text_sha256) == 3) {
        return true;
    }
    if (sscanf(line, "perplexity %d %d %d %d %lf", &x->n_text_tokens, &x->n_ctx, &x->n_chunks,
               &x->n_scored, &x->perplexity) == 5) {
        x->chunk_nll = calloc((size_t)x->n_chunks, sizeof *x->chunk_nll);
        return true;
    }
    if (strncmp(line, "text_tokens ", 12) == 0 && x->text_tokens == NULL) {
        x->text_tokens = real_ids(line + 12, &x->n_text_tokens);
        return x->text_tokens != NULL;
    }
    if (sscanf(line, "chunk %d %lf", &index, &nll) == 2) {
        if (index < 0 || index >= x->n_chunks) {
            return false;
        }
        x->chunk_nll[index] = nll;
        return true;
    }
    if (sscanf(line, "prompt %d%n", &index, &used) == 1) {
        if (index != x->n_prompts || line[used] != ' ') {
            return false;
        }
        x->prompts = realloc(x->prompts, (size_t)(index + 1) * sizeof *x->prompts);
        x->prompts[x->n_prompts++] = (struct real_prompt){.text = real_unescape(line + used + 1)};
        return true;
    }
    return x->n_prompts > 0 && real_prompt_line(&x->prompts[x->n_prompts - 1], line);
}

/* False when the file cannot be read or a line is not of the format; nothing is held then. */
static inline bool real_fixture_read(struct real_fixture *out, const char *path)
{
    memset(out, 0, sizeof *out);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        return false;
    }
    char *line = NULL;
    size_t capacity = 0;
    bool ok = true;
    while (ok && getline(&line, &capacity, file) >= 0) {
        ok = real_fixture_line(out, line);
    }
    free(line);
    fclose(file);
    ok = ok && out->n_chunks > 0 && out->n_prompts > 0;
    if (!ok) {
        real_fixture_free(out);
    }
    return ok;
}

#endif
