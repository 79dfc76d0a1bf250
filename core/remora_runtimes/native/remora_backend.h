/* Interface of a model in a shared library: functions that remora calls, with plain structs. ABI 1.
 *
 * A library exports four functions: remora_abi_version, remora_create, remora_run, remora_destroy; a fifth,
 * remora_describe, is optional. remora creates one instance for each instance of the model's instance groups and uses it
 * from one thread at a time, not always the same one. Several instances run at the same time, so the library must
 * synchronize access to their shared data. Python's global interpreter lock (GIL) is not held during these calls.
 *
 * A function that returns a status writes its reason, a line of UTF-8, into `error`. The structs of a version never
 * change: additions come with a new ABI number.
 */
#ifndef REMORA_BACKEND_H
#define REMORA_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define REMORA_ABI_VERSION 1
#define REMORA_MAX_RANK 32

#if defined(_WIN32)
#define REMORA_EXPORT __declspec(dllexport)
#else
#define REMORA_EXPORT __attribute__((visibility("default")))
#endif

/* The wire's datatypes, with the numbers of the model configuration. */
enum {
  REMORA_BOOL = 1, REMORA_UINT8 = 2, REMORA_UINT16 = 3, REMORA_UINT32 = 4, REMORA_UINT64 = 5,
  REMORA_INT8 = 6, REMORA_INT16 = 7, REMORA_INT32 = 8, REMORA_INT64 = 9,
  REMORA_FP16 = 10, REMORA_FP32 = 11, REMORA_FP64 = 12,
  REMORA_BYTES = 13, /* each element: its length as a little-endian uint32, then its bytes */
  REMORA_BF16 = 14
};

/* Status of a function. Clients receive the error code of the same name. */
enum {
  REMORA_OK = 0, REMORA_INTERNAL = 1, REMORA_INVALID_ARGUMENT = 2, REMORA_UNAVAILABLE = 3, REMORA_UNSUPPORTED = 4
};

/* An input: dense, row-major, little-endian, aligned to its element. Read only, and only during the call. */
typedef struct {
  const char *name;
  int32_t datatype;
  uint32_t rank;
  const int64_t *shape;
  const void *data;
  uint64_t byte_size;
} remora_tensor;

/* A requested output. */
typedef struct {
  const char *name;
  int32_t datatype;
} remora_output;

/* A batch. For each requested output, in any order and exactly once, remora_run calls
 *   allocate(request->context, its index in `outputs`, rank, shape, byte_size)
 * and fills the returned memory before it returns. NULL means that shape and size do not fit the datatype or that
 * memory is exhausted: return REMORA_INTERNAL then. */
typedef struct {
  const remora_tensor *inputs;
  uint64_t input_count;
  const remora_output *outputs;
  uint64_t output_count;
  void *(*allocate)(void *context, uint64_t index, uint32_t rank, const int64_t *shape, uint64_t byte_size);
  void *context;
} remora_request;

/* Description of an instance's model. Valid during remora_create only. */
typedef struct {
  const char *model_name;
  int64_t model_version;
  const char *version_directory; /* the model's files */
  const char *config;            /* the model's configuration, JSON */
  const char *instance_name;
  const char *device_kind;       /* "CPU", "GPU" or "MODEL" */
  int32_t device_id;
  uint32_t threads;              /* number of threads that the instance may use */
} remora_model;

/* REMORA_ABI_VERSION of the header that the library was built with. Called before anything else. */
REMORA_EXPORT uint32_t remora_abi_version(void);

/* Creates an instance and stores its handle in *instance. Any value is valid, NULL included. */
REMORA_EXPORT int remora_create(const remora_model *model, void **instance, char *error, size_t error_size);

/* Runs one batch. */
REMORA_EXPORT int remora_run(void *instance, const remora_request *request, char *error, size_t error_size);

/* Called once for each created instance, when nothing runs in it. */
REMORA_EXPORT void remora_destroy(void *instance);

/* Optional: defaults for fields that the model's configuration may omit, as JSON with the configuration's field names
 * (max_batch_size, input, output, ...). The text must stay valid as long as the library is loaded. */
REMORA_EXPORT const char *remora_describe(void);

#ifdef __cplusplus
}
#endif
#endif
