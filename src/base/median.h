/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SL_BASE_MEDIAN_H
#define SL_BASE_MEDIAN_H

/* Sort `values` (n >= 1, no NaN) in rising order and return the middle one, of an even number the
 * upper of the two. */
double sl_median(double *values, int n);

#endif
