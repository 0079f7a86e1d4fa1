/* SPDX-License-Identifier: Apache-2.0
 *
 * Pre-tokenizers by PCRE2; see pretokenizer.h. The expressions are those of the families' own
 * tokenizer files. Two things differ in spelling, not in meaning: white space is written out,
 * because PCRE2 counts U+180E in and Unicode does not, and `\s+$` has a look-behind, because it
 * would otherwise take quadratic time on long runs.
 */
#include "text/pretokenizer.h"

#include <string.h>

#ifndef PCRE2_CODE_UNIT_WIDTH
#define PCRE2_CODE_UNIT_WIDTH 8
#endif
#include <pcre2.h>

#include "base/error.h"
#include "base/mem.h"

#define MAX_RULES 6

/* Unicode White_Space, for use inside brackets. */
#define WS                                                                                         \
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"    \
    "\\x{205f}\\x{3000}"
#define LETTERS_OR_DIGITS "\\p{L}\\p{N}"
#define NOT_BEFORE_TEXT "[" WS "]+(?![^" WS "])" /* a run of white space less its last one */
#define CONTRACTIONS "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
#define TAIL(marks)                                                                                \
    "| ?[^" WS LETTERS_OR_DIGITS "]+" marks "|[" WS "]*[\\r\\n]+|" NOT_BEFORE_TEXT "|[" WS "]+"

static const char GPT2[] = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^" WS LETTERS_OR_DIGITS
                           "]+|" NOT_BEFORE_TEXT "|[" WS "]+";
static const char LLAMA3[] =
    CONTRACTIONS "|[^\\r\\n" LETTERS_OR_DIGITS "]?\\p{L}+|\\p{N}{1,3}" TAIL("[\\r\\n]*");
static const char QWEN2[] =
    CONTRACTIONS "|[^\\r\\n" LETTERS_OR_DIGITS "]?\\p{L}+|\\p{N}" TAIL("[\\r\\n]*");
static const char QWEN35[] =
    CONTRACTIONS "|[^\\r\\n" LETTERS_OR_DIGITS "]?[\\p{L}\\p{M}]+|\\p{N}| ?[^" WS
                 "\\p{L}\\p{M}\\p{N}]+[\\r\\n]*|[" WS "]*[\\r\\n]+|" NOT_BEFORE_TEXT "|[" WS "]+";
static const char SEED_CODER[] =
    CONTRACTIONS "|[^\\r\\n" LETTERS_OR_DIGITS "]?\\p{L}+|\\p{N}| ?[^" WS LETTERS_OR_DIGITS
                 "\\r\\n]+|[" WS "]*[\\r\\n]+|" NOT_BEFORE_TEXT "|[" WS "]+";

/* Words with a capital head and a small tail; scripts without case and marks go with both. */
#define CAPS "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define SMALL "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define CASED_WORDS(suffix)                                                                        \
    "[^\\r\\n" LETTERS_OR_DIGITS "]?" CAPS "*" SMALL "+" suffix "|[^\\r\\n" LETTERS_OR_DIGITS      \
    "]?" CAPS "+" SMALL "*" suffix
static const char GPT4O[] = CASED_WORDS(CONTRACTIONS "?") "|\\p{N}{1,3}" TAIL("[\\r\\n/]*");
static const char TEKKEN[] = CASED_WORDS("") "|\\p{N}" TAIL("[\\r\\n/]*");

static const char DIGIT[] = "\\p{N}";
static const char DIGITS[] = "\\p{N}+";
static const char UP_TO_3_DIGITS[] = "\\p{N}{1,3}";
static const char ASCII_3_DIGITS[] = "[0-9][0-9][0-9]";
static const char NEWLINE[] = "[\\r\\n]";
static const char CJK_AND_HANGUL[] = "[\\x{4e00}-\\x{9fa5}\\x{800}-\\x{4e00}\\x{ac00}-\\x{d7ff}]+";
static const char CJK_AND_KANA[] = "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+";
static const char DEFAULT_PUNCTUATION[] = "[\\p{P}\\$\\+<=>\\^~\\|]+";

static const char DEEPSEEK_WORDS[] =
    "[" WS "]?[A-Za-z\\x{b5}\\x{c0}-\\x{d6}\\x{d8}-\\x{f6}"
    "\\x{f8}-\\x{1ba}\\x{1bc}-\\x{1bf}\\x{1c4}-\\x{293}\\x{295}-\\x{2af}"
    "\\x{370}-\\x{373}\\x{376}\\x{377}\\x{37b}-\\x{37d}\\x{37f}\\x{386}"
    "\\x{388}-\\x{38a}\\x{38c}\\x{38e}-\\x{3a1}\\x{3a3}-\\x{3f5}\\x{3f7}-\\x{481}"
    "\\x{48a}-\\x{52f}\\x{531}-\\x{556}\\x{10a0}-\\x{10c5}\\x{13a0}-\\x{13f5}"
    "\\x{13f8}-\\x{13fd}\\x{1c90}-\\x{1cba}\\x{1cbd}-\\x{1cbf}\\x{1d00}-\\x{1d2b}"
    "\\x{1d6b}-\\x{1d77}\\x{1d79}-\\x{1d9a}\\x{1e00}-\\x{1f15}\\x{1f18}-\\x{1f1d}"
    "\\x{1f20}-\\x{1f45}\\x{1f48}-\\x{1f4d}\\x{1f50}-\\x{1f57}\\x{1f59}\\x{1f5b}"
    "\\x{1f5d}\\x{1f5f}-\\x{1f7d}\\x{1f80}-\\x{1fb4}\\x{1fb6}-\\x{1fbc}\\x{1fbe}"
    "\\x{1fc2}-\\x{1fc4}\\x{1fc6}-\\x{1fcc}\\x{1fd0}-\\x{1fd3}\\x{1fd6}-\\x{1fdb}"
    "\\x{1fe0}-\\x{1fec}\\x{1ff2}-\\x{1ff4}\\x{1ff6}-\\x{1ffc}\\x{2102}\\x{2107}"
    "\\x{210a}-\\x{2113}\\x{2115}\\x{2119}-\\x{211d}\\x{2124}\\x{2126}\\x{2128}"
    "\\x{212a}-\\x{212d}\\x{212f}-\\x{2134}\\x{2139}\\x{213c}-\\x{213f}"
    "\\x{2145}-\\x{2149}\\x{214e}\\x{2183}\\x{2184}\\x{2c00}-\\x{2c7b}"
    "\\x{2c7e}-\\x{2ce4}\\x{2ceb}-\\x{2cee}\\x{2cf2}\\x{2cf3}\\x{a640}-\\x{a66d}"
    "\\x{a680}-\\x{a69b}\\x{a722}-\\x{a76f}\\x{a771}-\\x{a787}\\x{a78b}-\\x{a78e}"
    "\\x{ab70}-\\x{abbf}\\x{fb00}-\\x{fb06}\\x{fb13}-\\x{fb17}\\x{ff21}-\\x{ff3a}"
    "\\x{ff41}-\\x{ff5a}\\x{10400}-\\x{1044f}\\x{104b0}-\\x{104d3}"
    "\\x{104d8}-\\x{104fb}\\x{10c80}-\\x{10cb2}\\x{10cc0}-\\x{10cf2}"
    "\\x{118a0}-\\x{118df}\\x{1e900}-\\x{1e943}]+";
static const char DEEPSEEK_PUNCTUATION[] =
    "[" WS "]?[!-/:-~\\x{ff01}-\\x{ff0f}\\x{ff1a}-\\x{ff5e}\\x{2018}-\\x{201f}"
    "\\x{3000}-\\x{3002}]+";
static const char SPACE_AT_END[] = "(?<![" WS "])[" WS "]++\\z";
static const char CODER_WORDS[] = "[" WS "]?\\p{L}+";
static const char CODER_PUNCTUATION[] = "[" WS "]?\\p{P}+";
static const char DEEPSEEK3[] =
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
    "|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*"
    "|[" WS "]*[\\r\\n]+|" NOT_BEFORE_TEXT "|[" WS "]+";

struct family {
    const char *names; /* separated by blanks; the first is the family's own */
    const char *rules[MAX_RULES];
    bool ignores_merges;
    bool adds_bos;
};

static const struct family FAMILIES[] = {
    {.names = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
     .rules = {LLAMA3},
     .ignores_merges = true,
     .adds_bos = true},
    {.names = "smaug-bpe dbrx chatglm-bpe glm4", .rules = {LLAMA3}},
    {.names = "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan kormo grok-2 solar-open",
     .rules = {QWEN2}},
    {.names = "qwen35", .rules = {QWEN35}},
    {.names = "seed-coder", .rules = {SEED_CODER}},
    {.names = "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
     .rules = {DIGIT, GPT2}},
    {.names = "gpt-2 phi-2 mpt olmo jais trillion exaone4 gigachat mellum modern-bert a.x-4.0 "
              "granite-docling jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code "
              "roberta-bpe",
     .rules = {GPT2}},
    {.names = "gpt-4o llama4 kanana2 minimax-m2", .rules = {GPT4O}},
    {.names = "tekken", .rules = {TEKKEN}, .ignores_merges = true, .adds_bos = true},
    {.names = "deepseek-llm",
     .rules = {NEWLINE, DEEPSEEK_WORDS, DEEPSEEK_PUNCTUATION, SPACE_AT_END, CJK_AND_HANGUL, DIGIT}},
    {.names = "deepseek-coder",
     .rules = {NEWLINE, CODER_WORDS, CODER_PUNCTUATION, CJK_AND_HANGUL, DIGIT}},
    {.names = "deepseek-v3 deepseek-r1 hunyuan-dense joyai-llm",
     .rules = {UP_TO_3_DIGITS, CJK_AND_KANA, DEEPSEEK3}},
    {.names = "default", .rules = {DEFAULT_PUNCTUATION, GPT2, DIGITS, ASCII_3_DIGITS}},
};
#define N_FAMILIES (sizeof(FAMILIES) / sizeof(FAMILIES[0]))

struct sl_pretokenizer {
    const struct family *family;
    char name[32];
    pcre2_general_context *memory;
    pcre2_match_context *limits;
    pcre2_code *rules[MAX_RULES];
    bool jit[MAX_RULES];
    size_t n_rules;
};

/* PCRE2 takes its memory from the library's allocator too. */
static void *pcre_alloc(size_t bytes, void *user)
{
    (void)user;
    return sl_alloc(SL_MEM_TEXT, bytes);
}

static void pcre_free(void *block, void *user)
{
    (void)user;
    sl_free(block);
}

static bool has_name(const char *names, const char *name, size_t length)
{
    while (*names != '\0') {
        const size_t n = strcspn(names, " ");
        if (n == length && memcmp(names, name, n) == 0) {
            return true;
        }
        names += n;
        names += strspn(names, " ");
    }
    return false;
}

static enum sluice_status unknown_name(const char *name, size_t length, struct sluice_error *err)
{
    char known[400];
    size_t at = 0;
    for (size_t i = 0; i < N_FAMILIES; i++) {
        const size_t n = strcspn(FAMILIES[i].names, " ");
        if (at + n + 3 > sizeof(known)) {
            break;
        }
        memcpy(known + at, FAMILIES[i].names, n);
        at += n;
        memcpy(known + at, ", ", 2);
        at += 2;
    }
    known[at - 2] = '\0';
    return sl_error_set(err, SLUICE_STATUS_UNSUPPORTED,
                        "tokenizer.ggml.pre: unknown pre-tokenizer '%.*s'; known are %s",
                        length < 60 ? (int)length : 60, name, known);
}

static enum sluice_status compile_rules(struct sl_pretokenizer *p, struct sluice_error *err)
{
    pcre2_compile_context *context = pcre2_compile_context_create(p->memory);
    SL_CHECK(context != NULL, OUT_OF_MEMORY, err, "no memory for the pre-tokenizer");
    enum sluice_status status = SLUICE_STATUS_OK;
    for (size_t i = 0; i < MAX_RULES && p->family->rules[i] != NULL; i++) {
        int code;
        PCRE2_SIZE offset;
        p->rules[i] =
            pcre2_compile((PCRE2_SPTR)p->family->rules[i], PCRE2_ZERO_TERMINATED,
                          PCRE2_UTF | PCRE2_UCP | PCRE2_NO_UTF_CHECK, &code, &offset, context);
        if (p->rules[i] == NULL) {
            const bool no_memory = code == PCRE2_ERROR_NOMEMORY || code == 121;
            status =
                sl_error_set(err, no_memory ? SLUICE_STATUS_OUT_OF_MEMORY : SLUICE_STATUS_INTERNAL,
                             "pre-tokenizer %s: rule %zu does not compile (PCRE2 error %d at %zu)",
                             p->name, i, code, (size_t)offset);
            break;
        }
        /* Systems without just-in-time compilation interpret: slower, with the same result. */
        p->jit[i] = pcre2_jit_compile(p->rules[i], PCRE2_JIT_COMPLETE) == 0;
        p->n_rules = i + 1;
    }
    pcre2_compile_context_free(context);
    return status;
}

enum sluice_status sl_pretokenizer_create(struct sl_pretokenizer **out, const char *name,
                                          size_t name_length, struct sluice_error *err)
{
    *out = NULL;
    const struct family *family = NULL;
    for (size_t i = 0; i < N_FAMILIES && family == NULL; i++) {
        if (has_name(FAMILIES[i].names, name, name_length)) {
            family = &FAMILIES[i];
        }
    }
    if (family == NULL) {
        return unknown_name(name, name_length, err);
    }
    struct sl_pretokenizer *p = sl_calloc(SL_MEM_TEXT, 1, sizeof(*p));
    SL_CHECK(p != NULL, OUT_OF_MEMORY, err, "no memory for the pre-tokenizer");
    p->family = family;
    memcpy(p->name, name, name_length < sizeof(p->name) ? name_length : sizeof(p->name) - 1);
    p->memory = pcre2_general_context_create(pcre_alloc, pcre_free, NULL);
    p->limits = p->memory != NULL ? pcre2_match_context_create(p->memory) : NULL;
    enum sluice_status status;
    if (p->limits == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for the pre-tokenizer");
    } else {
        /* The rules run in linear time, but a run of a million blanks backs up a million times,
         * and the default limits would call that runaway. */
        pcre2_set_match_limit(p->limits, UINT32_MAX);
        pcre2_set_depth_limit(p->limits, UINT32_MAX);
        pcre2_set_heap_limit(p->limits, UINT32_MAX);
        status = compile_rules(p, err);
    }
    if (status != SLUICE_STATUS_OK) {
        sl_pretokenizer_destroy(&p);
    }
    *out = p;
    return status;
}

void sl_pretokenizer_destroy(struct sl_pretokenizer **pretokenizer)
{
    struct sl_pretokenizer *p = *pretokenizer;
    if (p == NULL) {
        return;
    }
    for (size_t i = 0; i < MAX_RULES; i++) {
        pcre2_code_free(p->rules[i]);
    }
    pcre2_match_context_free(p->limits);
    pcre2_general_context_free(p->memory);
    sl_free(p);
    *pretokenizer = NULL;
}

const char *sl_pretokenizer_name(const struct sl_pretokenizer *pretokenizer)
{
    return pretokenizer->name;
}

bool sl_pretokenizer_ignores_merges(const struct sl_pretokenizer *pretokenizer)
{
    return pretokenizer->family->ignores_merges;
}

bool sl_pretokenizer_adds_bos(const struct sl_pretokenizer *pretokenizer)
{
    return pretokenizer->family->adds_bos;
}

void sl_piece_ends_finish(struct sl_piece_ends *ends)
{
    sl_free(ends->items);
    *ends = (struct sl_piece_ends){0};
}

static enum sluice_status push_end(struct sl_piece_ends *ends, size_t end, struct sluice_error *err)
{
    if (ends->n == ends->max) {
        const size_t max = ends->max < 32 ? 64 : ends->max * 2;
        size_t *items = sl_realloc(SL_MEM_TEXT, ends->items, max, sizeof(*items));
        SL_CHECK(items != NULL, OUT_OF_MEMORY, err, "no memory for %zu pieces of text", max);
        ends->items = items;
        ends->max = max;
    }
    ends->items[ends->n++] = end;
    return SLUICE_STATUS_OK;
}

/* Find the next match in a piece. 1: found, 0: none, below 0: a PCRE2 error. */
static int next_match(const struct sl_pretokenizer *p, size_t rule, pcre2_match_data *match,
                      const char *piece, size_t length, size_t from)
{
    int rc = PCRE2_ERROR_JIT_STACKLIMIT;
    if (p->jit[rule]) {
        rc = pcre2_jit_match(p->rules[rule], (PCRE2_SPTR)piece, length, from, 0, match, p->limits);
    }
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
        rc = pcre2_match(p->rules[rule], (PCRE2_SPTR)piece, length, from,
                         PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, match, p->limits);
    }
    return rc > 0 ? 1 : rc == PCRE2_ERROR_NOMATCH ? 0 : rc;
}

/* Cut one piece of the text, which starts at `start`, by one rule. The rule sees the piece alone,
 * so that look-around ends at its borders. */
static enum sluice_status cut_piece(const struct sl_pretokenizer *p, size_t rule,
                                    pcre2_match_data *match, const char *text, size_t start,
                                    size_t end, struct sl_piece_ends *out, struct sluice_error *err)
{
    const size_t length = end - start;
    size_t done = 0;
    while (done < length) {
        const int found = next_match(p, rule, match, text + start, length, done);
        SL_CHECK(found != PCRE2_ERROR_NOMEMORY, OUT_OF_MEMORY, err,
                 "no memory to cut a text of %zu bytes", length);
        SL_CHECK(found >= 0, INTERNAL, err,
                 "pre-tokenizer %s: PCRE2 error %d on a text of %zu bytes", p->name, found, length);
        if (found == 0) {
            break;
        }
        const PCRE2_SIZE *range = pcre2_get_ovector_pointer(match);
        if (range[1] <= done) {
            break; /* no rule matches nothing; this keeps the loop finite all the same */
        }
        if (range[0] > done) {
            SL_TRY(push_end(out, start + range[0], err));
        }
        SL_TRY(push_end(out, start + range[1], err));
        done = range[1];
    }
    return done < length ? push_end(out, end, err) : SLUICE_STATUS_OK;
}

enum sluice_status sl_pretokenizer_split(const struct sl_pretokenizer *pretokenizer,
                                         const char *text, size_t length, struct sl_piece_ends *out,
                                         struct sluice_error *err)
{
    const struct sl_pretokenizer *p = pretokenizer;
    out->n = 0;
    if (length == 0) {
        return SLUICE_STATUS_OK;
    }
    pcre2_match_data *match = pcre2_match_data_create(1, p->memory);
    SL_CHECK(match != NULL, OUT_OF_MEMORY, err, "no memory for the pre-tokenizer");
    struct sl_piece_ends next = {0};
    enum sluice_status status;
    SL_TRY_OUT(push_end(out, length, err));
    for (size_t rule = 0; rule < p->n_rules; rule++) {
        next.n = 0;
        size_t start = 0;
        for (size_t i = 0; i < out->n; i++) {
            SL_TRY_OUT(cut_piece(p, rule, match, text, start, out->items[i], &next, err));
            start = out->items[i];
        }
        const struct sl_piece_ends swap = *out;
        *out = next;
        next = swap;
    }
out:
    sl_piece_ends_finish(&next);
    pcre2_match_data_free(match);
    return status;
}
