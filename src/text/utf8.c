/* SPDX-License-Identifier: Apache-2.0
 *
 * UTF-8 scanning; see utf8.h.
 */
#include "text/utf8.h"

#include <string.h>

size_t sl_utf8_announced(unsigned char lead)
{
    if (lead < 0x80) {
        return 1;
    }
    if (lead < 0xC2 || lead > 0xF4) {
        return 0;
    }
    return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

/* Whether `second` may follow `lead`: the lead bytes E0, ED, F0 and F4 narrow the range so that
 * overlong forms, surrogates and values past U+10FFFF are out. */
static bool second_byte_fits(unsigned char lead, unsigned char second)
{
    switch (lead) {
    case 0xE0:
        return second >= 0xA0 && second <= 0xBF;
    case 0xED:
        return second >= 0x80 && second <= 0x9F;
    case 0xF0:
        return second >= 0x90 && second <= 0xBF;
    case 0xF4:
        return second >= 0x80 && second <= 0x8F;
    default:
        return (second & 0xC0) == 0x80;
    }
}

/* How many bytes of the character at `text` are there and fit, up to what its lead announces. */
static size_t fitting_bytes(const unsigned char *text, size_t length, size_t announced)
{
    size_t n = 1;
    while (n < announced && n < length) {
        const bool fits = n == 1 ? second_byte_fits(text[0], text[1]) : (text[n] & 0xC0) == 0x80;
        if (!fits) {
            break;
        }
        n++;
    }
    return n;
}

size_t sl_utf8_char_length(const char *text, size_t length)
{
    const unsigned char *bytes = (const unsigned char *)text;
    const size_t announced = sl_utf8_announced(bytes[0]);
    if (announced <= 1) {
        return announced;
    }
    return fitting_bytes(bytes, length, announced) == announced ? announced : 0;
}

size_t sl_utf8_valid_prefix(const char *text, size_t length)
{
    size_t i = 0;
    while (i < length) {
        const size_t n = sl_utf8_char_length(text + i, length - i);
        if (n == 0) {
            break;
        }
        i += n;
    }
    return i;
}

size_t sl_utf8_incomplete_tail(const char *text, size_t length)
{
    const size_t most = length < 3 ? length : 3;
    for (size_t tail = 1; tail <= most; tail++) {
        const unsigned char *bytes = (const unsigned char *)text + length - tail;
        if ((bytes[0] & 0xC0) == 0x80) {
            continue;
        }
        const size_t announced = sl_utf8_announced(bytes[0]);
        return announced > tail && fitting_bytes(bytes, tail, announced) == tail ? tail : 0;
    }
    return 0;
}

size_t sl_utf8_write(char *out, uint32_t cp)
{
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | (cp >> 6));
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | (cp >> 12));
        out[1] = (char)(0x80 | ((cp >> 6) & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | (cp >> 18));
    out[1] = (char)(0x80 | ((cp >> 12) & 0x3F));
    out[2] = (char)(0x80 | ((cp >> 6) & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}

size_t sl_utf8_repair(char *out, const char *text, size_t length)
{
    size_t written = 0;
    size_t i = 0;
    while (i < length) {
        const size_t good = sl_utf8_valid_prefix(text + i, length - i);
        memcpy(out + written, text + i, good);
        written += good;
        i += good;
        if (i < length) {
            written += sl_utf8_write(out + written, 0xFFFD);
            i++;
        }
    }
    return written;
}
