/* SPDX-License-Identifier: Apache-2.0
 *
 * How often each expert of a mixture was used, kept from one run to the next in the cache: slots in
 * VRAM are filled by it at the start, and plans expect hits by it. The older a use, the less it
 * counts; see exec/experts.h for who counts.
 */
#ifndef SL_EXEC_USES_H
#define SL_EXEC_USES_H

#include "model/model.h"

/* Of a model: [n_layers, n_experts], to be freed; NULL where nothing (sane) is kept. */
float *sl_uses_load(const struct sl_model *model);
enum sluice_status sl_uses_save(const struct sl_model *model, const float *uses,
                                struct sluice_error *err);

#endif
