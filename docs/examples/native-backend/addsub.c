/* Model in C: the sum and the difference of two FP32 tensors of the same shape. */
#include <remora_backend.h>

#include <stdio.h>
#include <string.h>

uint32_t remora_abi_version(void) { return REMORA_ABI_VERSION; }

const char *remora_describe(void) {
  return "{\"max_batch_size\": 8, \"dynamic_batching\": {},"
         " \"input\": [{\"name\": \"a\", \"data_type\": \"TYPE_FP32\", \"dims\": [-1]},"
         "             {\"name\": \"b\", \"data_type\": \"TYPE_FP32\", \"dims\": [-1]}],"
         " \"output\": [{\"name\": \"sum\", \"data_type\": \"TYPE_FP32\", \"dims\": [-1]},"
         "              {\"name\": \"difference\", \"data_type\": \"TYPE_FP32\", \"dims\": [-1]}]}";
}

int remora_create(const remora_model *model, void **instance, char *error, size_t error_size) {
  (void)model, (void)error, (void)error_size;
  *instance = NULL; /* the model has no state */
  return REMORA_OK;
}

void remora_destroy(void *instance) { (void)instance; }

int remora_run(void *instance, const remora_request *request, char *error, size_t error_size) {
  const remora_tensor *a = NULL, *b = NULL;
  (void)instance;
  for (uint64_t i = 0; i < request->input_count; ++i) {
    if (strcmp(request->inputs[i].name, "a") == 0) a = &request->inputs[i];
    if (strcmp(request->inputs[i].name, "b") == 0) b = &request->inputs[i];
  }
  if (!a || !b || a->rank != b->rank || memcmp(a->shape, b->shape, a->rank * sizeof *a->shape) != 0) {
    snprintf(error, error_size, "a and b must have the same shape");
    return REMORA_INVALID_ARGUMENT;
  }
  const float *left = a->data, *right = b->data;
  for (uint64_t i = 0; i < request->output_count; ++i) {
    float sign = strcmp(request->outputs[i].name, "sum") == 0 ? 1.0f : -1.0f;
    float *out = request->allocate(request->context, i, a->rank, a->shape, a->byte_size);
    if (!out) return REMORA_INTERNAL;
    for (uint64_t at = 0; at < a->byte_size / sizeof(float); ++at) out[at] = left[at] + sign * right[at];
  }
  return REMORA_OK;
}
