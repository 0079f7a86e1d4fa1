/* SPDX-License-Identifier: Apache-2.0
 *
 * Vocabularies that work: every byte has a token, special tokens stand where programs look for
 * them, and the rest are made-up words over a..z, each reachable by a merge, so that real text
 * becomes tokens of a few letters and random tokens become readable text. The words count in base
 * 26 ("aa", "ab", ...), each without and with a space before it.
 */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "synth/synth_internal.h"

enum { TOKEN_NORMAL = 1, TOKEN_UNKNOWN = 2, TOKEN_CONTROL = 3, TOKEN_BYTE = 6 };

#define GPT2_SPACE "\xc4\xa0"    /* U+0120: a space byte in GPT-2's alphabet */
#define SPM_SPACE "\xe2\x96\x81" /* U+2581: SentencePiece's space */
#define MAX_SPECIAL 12

/* What differs between families. */
struct family {
    const char *model;
    const char *pre;
    const char *space;
    const char *special[MAX_SPECIAL]; /* control tokens, NULL-terminated */
    const char *bos;                  /* names out of `special` */
    const char *eos;
    const char *eot; /* or NULL */
    bool add_bos;
    const char *chat_template; /* or NULL */
};

static const char chatml[] =
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

static const char llama3_template[] =
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}";

static const char gemma_template[] =
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) "
    "+ '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";

static const struct family families[] = {
    [SL_SYNTH_VOCAB_LLAMA3] = {.model = "gpt2",
                               .pre = "llama-bpe",
                               .space = GPT2_SPACE,
                               .special = {"<|begin_of_text|>", "<|end_of_text|>",
                                           "<|start_header_id|>", "<|end_header_id|>",
                                           "<|eot_id|>"},
                               .bos = "<|begin_of_text|>",
                               .eos = "<|end_of_text|>",
                               .eot = "<|eot_id|>",
                               .add_bos = true,
                               .chat_template = llama3_template},
    [SL_SYNTH_VOCAB_TEKKEN] = {.model = "gpt2",
                               .pre = "tekken",
                               .space = GPT2_SPACE,
                               .special = {"<unk>", "<s>", "</s>", "[INST]", "[/INST]"},
                               .bos = "<s>",
                               .eos = "</s>",
                               .add_bos = true},
    [SL_SYNTH_VOCAB_QWEN] = {.model = "gpt2",
                             .pre = "qwen2",
                             .space = GPT2_SPACE,
                             .special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
                             .bos = "<|endoftext|>",
                             .eos = "<|im_end|>",
                             .chat_template = chatml},
    [SL_SYNTH_VOCAB_SMOLLM] = {.model = "gpt2",
                               .pre = "smollm",
                               .space = GPT2_SPACE,
                               .special = {"<|endoftext|>", "<|im_start|>", "<|im_end|>"},
                               .bos = "<|im_start|>",
                               .eos = "<|im_end|>",
                               .chat_template = chatml},
    [SL_SYNTH_VOCAB_O200K] = {.model = "gpt2",
                              .pre = "gpt-4o",
                              .space = GPT2_SPACE,
                              .special = {"<|startoftext|>", "<|endoftext|>", "<|return|>",
                                          "<|channel|>", "<|start|>", "<|end|>", "<|message|>",
                                          "<|call|>"},
                              .bos = "<|startoftext|>",
                              .eos = "<|return|>"},
    [SL_SYNTH_VOCAB_GEMMA] = {.model = "llama",
                              .pre = "default",
                              .space = SPM_SPACE,
                              .special = {"<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>",
                                          "<end_of_turn>"},
                              .bos = "<bos>",
                              .eos = "<eos>",
                              .eot = "<end_of_turn>",
                              .add_bos = true,
                              .chat_template = gemma_template},
};

/* The vocabulary being built. Texts lie in a list of blocks; at most n_vocab of each array. */
struct builder {
    const struct family *family;
    bool sentencepiece;
    uint32_t n_vocab;
    uint32_t n_tokens;
    uint32_t n_merges;
    const char **tokens;
    const char **merges; /* gpt2 style only */
    float *scores;       /* SentencePiece style only */
    int32_t *types;
    struct text_block *texts;
    bool out_of_memory;
};

struct text_block {
    struct text_block *next;
    size_t used;
    char data[65536];
};

static const char *keep_text(struct builder *b, const char *text)
{
    const size_t bytes = strlen(text) + 1; /* all are short */
    if (b->texts == NULL || sizeof(b->texts->data) - b->texts->used < bytes) {
        struct text_block *block = sl_alloc(SL_MEM_TEXT, sizeof(*block));
        if (block == NULL) {
            b->out_of_memory = true;
            return "";
        }
        block->next = b->texts;
        block->used = 0;
        b->texts = block;
    }
    char *copy = b->texts->data + b->texts->used;
    memcpy(copy, text, bytes);
    b->texts->used += bytes;
    return copy;
}

/* False when the vocabulary is full. */
static bool add_token(struct builder *b, const char *text, int32_t type, float score)
{
    if (b->n_tokens == b->n_vocab || b->out_of_memory) {
        return false;
    }
    b->tokens[b->n_tokens] = keep_text(b, text);
    b->types[b->n_tokens] = type;
    if (b->sentencepiece) {
        b->scores[b->n_tokens] = score;
    }
    b->n_tokens++;
    return true;
}

/* A token that is two others joined. Earlier ones win merges: by rank or by score. */
static bool add_pair(struct builder *b, const char *left, const char *right)
{
    char text[64];
    snprintf(text, sizeof(text), "%s%s", left, right);
    if (!add_token(b, text, TOKEN_NORMAL, -(float)b->n_tokens)) {
        return false;
    }
    if (!b->sentencepiece) {
        snprintf(text, sizeof(text), "%s %s", left, right);
        b->merges[b->n_merges++] = keep_text(b, text);
    }
    return true;
}

/* GPT-2's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 and up, in order
 * of the bytes. */
static void gpt2_byte(unsigned byte, unsigned *n_moved, char out[4])
{
    const bool kept =
        (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    const unsigned code = kept ? byte : 0x100 + (*n_moved)++;
    if (code < 0x80) {
        out[0] = (char)code;
        out[1] = '\0';
    } else {
        out[0] = (char)(0xc0 | code >> 6);
        out[1] = (char)(0x80 | (code & 0x3f));
        out[2] = '\0';
    }
}

static void add_bytes(struct builder *b)
{
    unsigned n_moved = 0;
    char text[8];
    for (unsigned byte = 0; byte < 256; byte++) {
        if (b->sentencepiece) {
            snprintf(text, sizeof(text), "<0x%02X>", byte);
            add_token(b, text, TOKEN_BYTE, 0);
        } else {
            gpt2_byte(byte, &n_moved, text);
            add_token(b, text, TOKEN_NORMAL, 0);
        }
    }
}

/* SentencePiece merges characters, so each needs its own token beside the byte's. */
static void add_characters(struct builder *b)
{
    add_token(b, SPM_SPACE, TOKEN_NORMAL, -(float)b->n_tokens);
    char text[2] = "a";
    for (char ch = 'a'; ch <= 'z'; ch++) {
        text[0] = ch;
        add_token(b, text, TOKEN_NORMAL, -(float)b->n_tokens);
    }
    for (char ch = 0x21; ch < 0x7f; ch++) {
        text[0] = ch;
        if (ch < 'a' || ch > 'z') {
            add_token(b, text, TOKEN_NORMAL, -(float)b->n_tokens);
        }
    }
}

/* The next word of the same length, or one more letter. */
static void next_word(char word[16])
{
    size_t i = strlen(word);
    while (i > 0 && word[i - 1] == 'z') {
        word[--i] = 'a';
    }
    if (i > 0) {
        word[i - 1]++;
    } else {
        memmove(word + 1, word, strlen(word) + 1);
        word[0] = 'a';
    }
}

static void add_words(struct builder *b)
{
    char word[16] = "a";
    for (;;) {
        const size_t length = strlen(word);
        if (length > 1) {
            char left[16];
            memcpy(left, word, length);
            left[length - 1] = '\0';
            if (!add_pair(b, left, word + length - 1)) {
                return;
            }
        }
        if (!add_pair(b, b->family->space, word)) {
            return;
        }
        next_word(word);
    }
}

static uint32_t find_token(const struct builder *b, const char *text)
{
    for (uint32_t i = 0; i < b->n_tokens; i++) {
        if (strcmp(b->tokens[i], text) == 0) {
            return i;
        }
    }
    return 0; /* not reached: `text` is one of the family's special tokens */
}

static uint32_t n_special(const struct family *family)
{
    uint32_t n = 0;
    while (n < MAX_SPECIAL && family->special[n] != NULL) {
        n++;
    }
    return n;
}

static void build(struct builder *b)
{
    const uint32_t n = n_special(b->family);
    const uint32_t n_vocab = b->n_vocab;
    /* SentencePiece families have their special tokens first, the others last. */
    if (b->sentencepiece) {
        for (uint32_t i = 0; i < n; i++) {
            const bool unknown = strcmp(b->family->special[i], "<unk>") == 0;
            add_token(b, b->family->special[i], unknown ? TOKEN_UNKNOWN : TOKEN_CONTROL, 0);
        }
        add_bytes(b);
        add_characters(b);
        add_words(b);
        return;
    }
    b->n_vocab = n_vocab - n;
    add_bytes(b);
    add_words(b);
    b->n_vocab = n_vocab;
    for (uint32_t i = 0; i < n; i++) {
        add_token(b, b->family->special[i], TOKEN_CONTROL, 0);
    }
}

static void write_keys(const struct builder *b, struct sl_gguf_writer *w)
{
    const struct family *f = b->family;
    sl_gguf_writer_set_string(w, "tokenizer.ggml.model", f->model);
    sl_gguf_writer_set_string(w, "tokenizer.ggml.pre", f->pre);
    sl_gguf_writer_set_strings(w, "tokenizer.ggml.tokens", b->tokens, b->n_tokens);
    sl_gguf_writer_set_array(w, "tokenizer.ggml.token_type", SL_GGUF_I32, b->types, b->n_tokens);
    if (b->sentencepiece) {
        sl_gguf_writer_set_array(w, "tokenizer.ggml.scores", SL_GGUF_F32, b->scores, b->n_tokens);
        sl_gguf_writer_set_u32(w, "tokenizer.ggml.unknown_token_id", find_token(b, "<unk>"));
        sl_gguf_writer_set_u32(w, "tokenizer.ggml.padding_token_id", find_token(b, "<pad>"));
        sl_gguf_writer_set_bool(w, "tokenizer.ggml.add_space_prefix", false);
    } else {
        sl_gguf_writer_set_strings(w, "tokenizer.ggml.merges", b->merges, b->n_merges);
    }
    sl_gguf_writer_set_u32(w, "tokenizer.ggml.bos_token_id", find_token(b, f->bos));
    sl_gguf_writer_set_u32(w, "tokenizer.ggml.eos_token_id", find_token(b, f->eos));
    if (f->eot != NULL) {
        sl_gguf_writer_set_u32(w, "tokenizer.ggml.eot_token_id", find_token(b, f->eot));
    }
    sl_gguf_writer_set_bool(w, "tokenizer.ggml.add_bos_token", f->add_bos);
    if (f->chat_template != NULL) {
        sl_gguf_writer_set_string(w, "tokenizer.chat_template", f->chat_template);
    }
}

static void finish(struct builder *b)
{
    while (b->texts != NULL) {
        struct text_block *next = b->texts->next;
        sl_free(b->texts);
        b->texts = next;
    }
    sl_free(b->tokens);
    sl_free(b->merges);
    sl_free(b->scores);
    sl_free(b->types);
}

enum sluice_status sl_synth_vocab_write(struct sl_gguf_writer *w,
                                        const struct sl_synth_shape *shape,
                                        struct sluice_error *err)
{
    struct builder b = {.family = &families[shape->vocab],
                        .sentencepiece = shape->vocab == SL_SYNTH_VOCAB_GEMMA,
                        .n_vocab = shape->n_vocab};
    const uint32_t least = 256 + n_special(b.family);
    SL_CHECK(shape->n_vocab >= least, INVALID_ARGUMENT, err,
             "a vocabulary of %u tokens is too small: 256 bytes and %u special tokens need %u",
             shape->n_vocab, n_special(b.family), least);
    b.tokens = sl_calloc(SL_MEM_TEXT, b.n_vocab, sizeof(*b.tokens));
    b.merges = sl_calloc(SL_MEM_TEXT, b.n_vocab, sizeof(*b.merges));
    b.scores = sl_calloc(SL_MEM_TEXT, b.n_vocab, sizeof(*b.scores));
    b.types = sl_calloc(SL_MEM_TEXT, b.n_vocab, sizeof(*b.types));
    b.out_of_memory = !b.tokens || !b.merges || !b.scores || !b.types;
    if (!b.out_of_memory) {
        build(&b);
    }
    if (!b.out_of_memory) {
        write_keys(&b, w);
    }
    const bool good = !b.out_of_memory;
    finish(&b);
    SL_CHECK(good, OUT_OF_MEMORY, err, "out of memory for a vocabulary of %u tokens",
             shape->n_vocab);
    return SLUICE_STATUS_OK;
}
