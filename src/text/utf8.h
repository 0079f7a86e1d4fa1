/* SPDX-License-Identifier: Apache-2.0
 *
 * UTF-8 scanning. "Well-formed" is as in the Unicode standard (table 3-7): no overlong forms, no
 * surrogates, nothing above U+10FFFF.
 */
#ifndef SL_TEXT_UTF8_H
#define SL_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes that a lead byte announces: 1 to 4, or 0 for a byte that cannot start a character. */
size_t sl_utf8_announced(unsigned char lead);

/* Length of the well-formed character at `text`, or 0 when there is none. `length` > 0. */
size_t sl_utf8_char_length(const char *text, size_t length);

/* Length of the longest well-formed prefix of `text`. */
size_t sl_utf8_valid_prefix(const char *text, size_t length);

/* How many bytes at the end of `text` begin a character that more bytes could complete (0 to 3). */
size_t sl_utf8_incomplete_tail(const char *text, size_t length);

/* Write `cp` (a valid scalar value) to `out` (4 bytes of room) and return the number of bytes. */
size_t sl_utf8_write(char *out, uint32_t cp);

/* Copy `text` to `out` with every byte that is not part of a well-formed character replaced by
 * U+FFFD; returns the bytes written. `out` needs 3 * length bytes. */
size_t sl_utf8_repair(char *out, const char *text, size_t length);

#endif
