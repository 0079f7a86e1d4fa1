/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SL_DEVICE_CUDA_SM90_ATTENTION_SM90_H
#define SL_DEVICE_CUDA_SM90_ATTENTION_SM90_H

#include "device/cuda/attention_args.cuh"

/* Whether the kernel for compute capability 9.0 is the one for this pass. It does not split. */
bool sl_attention_sm90_takes(const struct sl_attn_args *args, const struct sl_cuda_props *props);
int sl_cuda_attention_sm90(cudaStream_t stream, const struct sl_attn_args *args);

#endif
