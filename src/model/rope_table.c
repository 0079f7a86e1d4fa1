/* SPDX-License-Identifier: Apache-2.0
 *
 * Rotation frequencies: one number for each rotated pair, in radians per position, so that the
 * operators need not know how they came about.
 *
 *   plain      f_i = base^(-2i / n_rot)
 *   linear     f_i / factor
 *   Llama 3    f_i / rope_freqs[i], a vector of the file
 *   YaRN       between f_i / factor (long waves) and f_i (short waves) by a ramp over i, and
 * rotated elements grow by 1 + 0.1 ln(factor). Source: arXiv 2309.00071, sections 3.2 to 3.4.
 *   LongRoPE   f_i / rope_factors_{short,long}[i], by whether the context is longer than trained
 *
 * Layers with a sliding window have a table of their own: plain, with the architecture's base.
 */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "model/model_internal.h"

enum scaling { SCALING_NONE, SCALING_LINEAR, SCALING_YARN, SCALING_LONGROPE };

struct rope_options {
    enum scaling scaling;
    double base;
    double factor; /* >= 0; 0 and 1 change nothing */
    double magnitude;
    double beta_fast, beta_slow;
    double n_ctx_original;
};

static enum sluice_status load_scaling_type(const struct sl_model *model, enum scaling *out,
                                            struct sluice_error *err)
{
    static const struct {
        const char *name;
        enum scaling scaling;
    } names[] = {
        {"none", SCALING_NONE},
        {"linear", SCALING_LINEAR},
        {"yarn", SCALING_YARN},
        {"longrope", SCALING_LONGROPE},
    };
    *out = SCALING_LINEAR; /* a factor alone means linear */
    char key[SL_KEY_BYTES];
    if (sl_key_find(model, "rope.scaling.type", key) == NULL) {
        return SLUICE_STATUS_OK;
    }
    struct sl_gguf_string text;
    SL_TRY(sl_gguf_get_string(model->file, key, &text, err));
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        if (strlen(names[i].name) == text.length &&
            memcmp(names[i].name, text.data, text.length) == 0) {
            *out = names[i].scaling;
            return SLUICE_STATUS_OK;
        }
    }
    return sl_error_set(err, SLUICE_STATUS_UNSUPPORTED,
                        "'%s' is '%.*s'; known: none, linear, yarn, longrope", key,
                        (int)(text.length < 32 ? text.length : 32), text.data);
}

static enum sluice_status load_base(const struct sl_model *model, const char *name, double fallback,
                                    double *out, struct sluice_error *err)
{
    float base = (float)fallback;
    SL_TRY(sl_key_f32(model, name, &base, err));
    SL_CHECK(base > 1.0F, FORMAT, err, "'%s.%s' is %g; must be above 1", model->arch->name, name,
             (double)base);
    *out = base;
    return SLUICE_STATUS_OK;
}

/* A non-negative scaling number. Two of the keys have an older name, tried second. */
static enum sluice_status load_factor(const struct sl_model *model, const char *name,
                                      const char *old_name, double *value, struct sluice_error *err)
{
    float read = (float)*value;
    if (old_name != NULL) {
        SL_TRY(sl_key_f32(model, old_name, &read, err));
    }
    SL_TRY(sl_key_f32(model, name, &read, err));
    SL_CHECK(read >= 0.0F && read <= 1e6F, FORMAT, err, "'%s.%s' is %g; must be 0 to 1000000",
             model->arch->name, name, (double)read);
    *value = read;
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_options(const struct sl_model *model, struct rope_options *out,
                                       struct sluice_error *err)
{
    *out =
        (struct rope_options){.factor = 1.0, .magnitude = 1.0, .beta_fast = 32.0, .beta_slow = 1.0};
    SL_TRY(load_scaling_type(model, &out->scaling, err));
    SL_TRY(load_base(model, "rope.freq_base", 10000.0, &out->base, err));
    SL_TRY(load_factor(model, "rope.scaling.factor", "rope.scale_linear", &out->factor, err));
    if (out->factor == 0.0 || out->scaling == SCALING_NONE) {
        out->factor = 1.0;
    }
    SL_TRY(load_factor(model, "rope.scaling.attn_factor", NULL, &out->magnitude, err));
    SL_TRY(load_factor(model, "rope.scaling.yarn_beta_fast", NULL, &out->beta_fast, err));
    SL_TRY(load_factor(model, "rope.scaling.yarn_beta_slow", NULL, &out->beta_slow, err));
    if (out->beta_fast == 0.0 || out->beta_slow == 0.0) {
        return sl_error_set(err, SLUICE_STATUS_FORMAT,
                            "'%s.rope.scaling.yarn_beta_fast' and '..._slow' must be positive",
                            model->arch->name);
    }
    uint32_t n_ctx = model->hp.n_ctx_train;
    SL_TRY(sl_key_u32(model, "rope.scaling.original_context_length", &n_ctx, err));
    out->n_ctx_original = n_ctx > 0 ? n_ctx : model->hp.n_ctx_train;
    return SLUICE_STATUS_OK;
}

/* The pair (a real number) that turns `rotations` times over the original context. */
static double yarn_pair(const struct rope_options *o, double n_rot, double rotations)
{
    const double wave = o->n_ctx_original / (rotations * 2.0 * M_PI);
    return n_rot * log(wave) / (2.0 * log(o->base));
}

/* Share of the unscaled frequency at each pair: 1 below the ramp, 0 above. */
static double yarn_share(double low, double high, double pair)
{
    const double width = high - low < 0.001 ? 0.001 : high - low;
    const double ramp = (pair - low) / width;
    return 1.0 - (ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp);
}

/* `divisors` may be NULL. */
static void fill_table(const struct rope_options *o, uint32_t n_rot, const float *divisors,
                       float *freq)
{
    double low = 0.0;
    double high = 0.0;
    if (o->scaling == SCALING_YARN) {
        low = fmax(0.0, floor(yarn_pair(o, n_rot, o->beta_fast)));
        high = fmin(n_rot - 1.0, ceil(yarn_pair(o, n_rot, o->beta_slow)));
    }
    for (uint32_t i = 0; i < n_rot / 2; i++) {
        double f = pow(o->base, -2.0 * i / n_rot);
        if (divisors != NULL) {
            f /= divisors[i];
        }
        if (o->scaling == SCALING_YARN) {
            const double share = yarn_share(low, high, i);
            f = f * share + f / o->factor * (1.0 - share);
        } else {
            f /= o->factor;
        }
        freq[i] = (float)f;
    }
}

/* Read the divisors of the scaling method into `freq` as a temporary place. */
static enum sluice_status load_divisors(const struct sl_model *model, const struct rope_options *o,
                                        uint32_t n_ctx, struct sl_tensor_uses *uses, float *freq,
                                        bool *found, struct sluice_error *err)
{
    const uint32_t n = model->hp.n_rot / 2;
    const char *name = "rope_freqs.weight";
    if (o->scaling == SCALING_LONGROPE) {
        /* Both must be there and right, though one context length uses one of them. */
        for (int longer = 0; longer < 2; longer++) {
            name = longer ? "rope_factors_long.weight" : "rope_factors_short.weight";
            const struct sl_gguf_tensor *t = sl_tensor_uses_find(uses, model, name);
            SL_CHECK(t != NULL, FORMAT, err, "tensor '%s' is missing", name);
            if (longer == ((double)n_ctx > o->n_ctx_original)) {
                SL_TRY(sl_vector_read(t, n, freq, err));
            }
        }
        *found = true;
    } else {
        const struct sl_gguf_tensor *t = sl_tensor_uses_find(uses, model, name);
        *found = t != NULL;
        if (t != NULL) {
            SL_TRY(sl_vector_read(t, n, freq, err));
        }
    }
    for (uint32_t i = 0; *found && i < n; i++) {
        SL_CHECK(isfinite(freq[i]) && freq[i] > 0.0F, FORMAT, err,
                 "tensor '%s' holds %g at %" PRIu32 "; must be positive", name, (double)freq[i], i);
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_rope_tables_build(struct sl_model *model, uint32_t n_ctx,
                                        struct sl_tensor_uses *uses, float *global, float *local,
                                        struct sluice_error *err)
{
    struct rope_options options;
    SL_TRY(load_options(model, &options, err));
    bool divided = false;
    SL_TRY(load_divisors(model, &options, n_ctx > 0 ? n_ctx : model->hp.n_ctx_train, uses, global,
                         &divided, err));
    fill_table(&options, model->hp.n_rot, divided ? global : NULL, global);
    if (options.scaling == SCALING_YARN && options.factor > 1.0) {
        options.magnitude *= 1.0 + 0.1 * log(options.factor);
    }
    model->layout->rope_magnitude[SL_ROPE_GLOBAL] = (float)options.magnitude;
    if (local != NULL) {
        struct rope_options plain = {.scaling = SCALING_NONE, .factor = 1.0};
        SL_TRY(
            load_base(model, "rope.freq_base_swa", model->arch->local_rope_base, &plain.base, err));
        fill_table(&plain, model->hp.n_rot, NULL, local);
        model->layout->rope_magnitude[SL_ROPE_LOCAL] = 1.0F;
    }
    return SLUICE_STATUS_OK;
}
