/* The parity suite's models: one of them is chosen by -DMODEL=..., weights come in weights.h. */
#include <remora_backend.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define IDENTITY 0
#define MLP 1
#define SINGLE 2
#define BROKEN 3

#ifdef WEIGHTS
#include "weights.h"
#else
static const float W1[16][32], W2[32][4];
#endif

#ifndef ABI
#define ABI REMORA_ABI_VERSION
#endif

uint32_t remora_abi_version(void) { return ABI; }

int remora_create(const remora_model *model, void **instance, char *error, size_t error_size) {
  if (strstr(model->config, "\"refuse\"")) {
    snprintf(error, error_size, "%s is refused in %s", model->model_name, model->instance_name);
    return REMORA_UNAVAILABLE;
  }
  *instance = malloc(1);
  return REMORA_OK;
}

void remora_destroy(void *instance) { free(instance); }

static int broken(const remora_request *request, char *error, size_t error_size) {
  /* What a wrong library may do: its first input says what. */
  const float what = *(const float *)request->inputs[0].data;
  const int64_t shape[2] = {1, 1}, huge[2] = {INT64_MAX, INT64_MAX}, negative[2] = {-1, 1};
  if (what == 0) return REMORA_OK; /* gives nothing */
  if (what == 1) return request->allocate(request->context, 7, 2, shape, 4) ? REMORA_OK : REMORA_INTERNAL;
  if (what == 2) return request->allocate(request->context, 0, 2, shape, 3) ? REMORA_OK : REMORA_INTERNAL;
  if (what == 3) return request->allocate(request->context, 0, 2, huge, UINT64_MAX) ? REMORA_OK : REMORA_INTERNAL;
  if (what == 4) return request->allocate(request->context, 0, 2, negative, 4) ? REMORA_OK : REMORA_INTERNAL;
  if (what == 5) return request->allocate(request->context, 0, 4000000, shape, 4) ? REMORA_OK : REMORA_INTERNAL;
  if (what == 6) return 99;
  if (what == 7) {
    snprintf(error, error_size, "seven is refused");
    return REMORA_INVALID_ARGUMENT;
  }
  float *out = request->allocate(request->context, 0, 2, shape, 4);
  if (!out) return REMORA_INTERNAL;
  *out = what;
  return REMORA_OK;
}

int remora_run(void *instance, const remora_request *request, char *error, size_t error_size) {
  const remora_tensor *x = &request->inputs[0];
  (void)instance, (void)W1, (void)W2;
  if (MODEL == BROKEN) return broken(request, error, error_size);
  if (MODEL == MLP) {
    const int64_t rows = x->shape[0], shape[2] = {rows, 4};
    float *out = request->allocate(request->context, 0, 2, shape, (uint64_t)rows * 4 * sizeof(float));
    if (!out) return REMORA_INTERNAL;
    for (int64_t row = 0; row < rows; ++row) {
      const float *in = (const float *)x->data + row * 16;
      float hidden[32] = {0};
      for (int j = 0; j < 32; ++j)
        for (int i = 0; i < 16; ++i) hidden[j] += in[i] * W1[i][j];
      for (int k = 0; k < 4; ++k) {
        float sum = 0;
        for (int j = 0; j < 32; ++j) sum += (hidden[j] > 0 ? hidden[j] : 0) * W2[j][k];
        out[row * 4 + k] = sum;
      }
    }
    return REMORA_OK;
  }
  char *out = request->allocate(request->context, 0, x->rank, x->shape, x->byte_size);
  if (!out) return REMORA_INTERNAL;
  memcpy(out, x->data, x->byte_size);
  if (MODEL == SINGLE)
    for (uint64_t at = 0; at < x->byte_size / sizeof(float); ++at) ((float *)out)[at] += 1;
  return REMORA_OK;
}
