/* The CUDA runtime's functions that remora calls, with their signatures, over the host's memory.
 *
 * It keeps what the real one keeps: who took what, on which device, and how large it is. A copy that leaves an
 * allocation fails, as does freeing what was not taken. A copy that the real one may not have done when the call returns
 * is done when somebody waits for its stream, and no sooner. Memory of devices is POSIX shared memory, so that handles
 * open in other processes. STAND_IN_DEVICES says how many devices there are (1).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { char reserved[64]; } cudaIpcMemHandle_t;
typedef int cudaError_t;
typedef void *cudaStream_t;

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_HANDLE = 400, ILLEGAL_ADDRESS = 700, UNSUPPORTED = 900 };
enum { FREE, DEVICE, PINNED, OPENED, STREAM };
enum { MOST = 4096 };

static struct { int kind; char *at; size_t size; int device; char name[48]; } held[MOST];
static struct copy {
    struct copy *next;
    cudaStream_t stream;
    char *to;
    const char *from;
    size_t size;
    char staged[];
} *first;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned made, copies, waits;
static __thread int current, chosen;
static __thread cudaError_t last;

static cudaError_t broken;

static int capturing, invalidated;
static __thread int relaxed;

/* Whether a call is forbidden because another thread captures a graph in the global mode; it ends that capture. */
static int forbidden(void) {
    if (!capturing || relaxed) return 0;
    invalidated = 1;
    return 1;
}

/* What a call answers: the error that never goes once there is one, and else its own. */
static cudaError_t said(cudaError_t status) {
    if (broken) status = broken;
    if (status) last = status;
    return status;
}

static int devices(void) {
    const char *said = getenv("STAND_IN_DEVICES");
    return said ? atoi(said) : 1;
}

static int find(const void *address) {
    for (int at = 0; at < MOST; at++)
        if (held[at].kind != FREE && (const char *)address >= held[at].at &&
            (const char *)address < held[at].at + held[at].size)
            return at;
    return -1;
}

static cudaError_t keep(int kind, char *at, size_t size, const char *name) {
    for (int slot = 0; slot < MOST; slot++)
        if (held[slot].kind == FREE) {
            held[slot].kind = kind, held[slot].at = at, held[slot].size = size, held[slot].device = current;
            snprintf(held[slot].name, sizeof held[slot].name, "%s", name);
            return OK;
        }
    return OUT_OF_MEMORY;
}

/* Under the lock: do what waits on a stream, in its order; all that waits where no stream is meant. */
static void finish(cudaStream_t stream, int all) {
    for (struct copy **at = &first; *at;) {
        struct copy *each = *at;
        if (!all && each->stream != stream) { at = &each->next; continue; }
        memmove(each->to, each->from, each->size);
        *at = each->next;
        free(each);
    }
}

static void put(cudaStream_t stream, void *to, const void *from, size_t size, int stage) {
    struct copy *made = malloc(sizeof *made + (stage ? size : 0)), **at = &first;
    if (stage) memcpy(made->staged, from, size);
    *made = (struct copy){NULL, stream, to, stage ? made->staged : from, size};
    while (*at) at = &(*at)->next;
    *at = made;
}

static cudaError_t release(void *address, int kind) {
    pthread_mutex_lock(&lock);
    finish(NULL, 1);
    int at = address ? find(address) : -1;
    cudaError_t status = INVALID_VALUE;
    if (at >= 0 && held[at].kind == kind && held[at].at == address) {
        munmap(held[at].at, held[at].size);
        if (kind == DEVICE) shm_unlink(held[at].name);
        held[at].kind = FREE;
        status = OK;
    }
    pthread_mutex_unlock(&lock);
    return status;
}

static cudaError_t map(void **out, size_t size, const char *name, int kind, int flags) {
    int file = shm_open(name, flags, 0600);
    if (file < 0) return INVALID_HANDLE;
    struct stat state;
    if ((flags & O_CREAT) && ftruncate(file, (off_t)size)) { close(file); return OUT_OF_MEMORY; }
    if (fstat(file, &state)) { close(file); return INVALID_HANDLE; }
    char *at = mmap(NULL, (size_t)state.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (at == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    cudaError_t status = keep(kind, at, (size_t)state.st_size, name);
    pthread_mutex_unlock(&lock);
    *out = at;
    return status;
}

const char *cudaGetErrorString(cudaError_t status) {
    switch (status) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_HANDLE: return "invalid resource handle";
    case UNSUPPORTED: return "operation not permitted when stream is capturing";
    case ILLEGAL_ADDRESS: return "an illegal memory access was encountered";
    default: return "unrecognized error code";
    }
}

cudaError_t cudaGetLastError(void) {
    cudaError_t status = last;
    last = broken;
    return status;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices();
    return said(*count ? OK : NO_DEVICE);
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= devices()) return said(devices() ? INVALID_DEVICE : NO_DEVICE);
    current = device, chosen = 1;
    return said(OK);
}

cudaError_t cudaGetDevice(int *device) {
    *device = current;
    return OK;
}

cudaError_t cudaMalloc(void **out, size_t size) {
    if (forbidden()) return said(UNSUPPORTED);
    const char *limit = getenv("STAND_IN_BYTES");
    if (limit && size > strtoull(limit, NULL, 10)) return said(OUT_OF_MEMORY);
    char name[48];
    snprintf(name, sizeof name, "/remora_stand_in_%ld_%u", (long)getpid(), __atomic_add_fetch(&made, 1, __ATOMIC_SEQ_CST));
    cudaError_t status = map(out, size, name, DEVICE, O_RDWR | O_CREAT | O_EXCL);
    if (status == OK) memset(*out, 0xFF, size); /* a device's memory is not zero; read as floats, this is NaN */
    return said(status);
}

cudaError_t cudaFree(void *address) { return said(forbidden() ? UNSUPPORTED : release(address, DEVICE)); }

cudaError_t cudaMallocHost(void **out, size_t size) {
    if (forbidden()) return said(UNSUPPORTED);
    *out = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return said(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    cudaError_t status = keep(PINNED, *out, size, "");
    pthread_mutex_unlock(&lock);
    return said(status);
}

cudaError_t cudaFreeHost(void *address) { return said(forbidden() ? UNSUPPORTED : release(address, PINNED)); }

cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode) {
    int before = relaxed ? 2 : 0;
    relaxed = *mode == 2, *mode = before;
    return said(OK);
}

static int is_device(int at) { return at >= 0 && (held[at].kind == DEVICE || held[at].kind == OPENED); }

static cudaError_t begin(void *to, const void *from, size_t size, cudaStream_t stream, int async) {
    cudaError_t status = OK;
    pthread_mutex_lock(&lock);
    int there = find(to), here = find(from), streamed = find(stream);
    if (there >= 0 && (char *)to + size > held[there].at + held[there].size) status = INVALID_VALUE;
    if (here >= 0 && (const char *)from + size > held[here].at + held[here].size) status = INVALID_VALUE;
    if (async && (streamed < 0 || held[streamed].kind != STREAM)) status = INVALID_HANDLE;
    copies++;
    int later = is_device(there) ? async || is_device(here) || here < 0 : async && there >= 0;
    if (status == OK) put(stream, to, from, size, here < 0);
    if (status == OK && !later) finish(stream, 0);
    pthread_mutex_unlock(&lock);
    return status;
}

cudaError_t cudaMemset(void *to, int value, size_t size) {
    char *values = malloc(size);
    memset(values, value, size);
    pthread_mutex_lock(&lock);
    int at = find(to);
    cudaError_t status = is_device(at) && (char *)to + size <= held[at].at + held[at].size ? OK : INVALID_VALUE;
    if (status == OK) put(NULL, to, values, size, 1);
    pthread_mutex_unlock(&lock);
    free(values);
    return said(status);
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    (void)kind;
    return said(begin(to, from, size, NULL, 0));
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, cudaStream_t stream) {
    (void)kind;
    return said(begin(to, from, size, stream, 1));
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
    (void)flags;
    *out = mmap(NULL, 1, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return said(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    cudaError_t status = keep(STREAM, *out, 1, "");
    pthread_mutex_unlock(&lock);
    return said(status);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    pthread_mutex_lock(&lock);
    waits += !stream;
    int known = !stream || find(stream) >= 0;
    if (known) finish(stream, 0);
    pthread_mutex_unlock(&lock);
    return said(known ? OK : INVALID_HANDLE);
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *available = (size_t)1 << 30;
    *total = (size_t)1 << 31;
    return said(OK);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) { return said(release(stream, STREAM) == OK ? OK : INVALID_HANDLE); }

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) {
    pthread_mutex_lock(&lock);
    int at = find(address);
    cudaError_t status = at >= 0 && held[at].kind == DEVICE ? OK : INVALID_VALUE;
    if (status == OK) {
        memset(handle, 0, sizeof *handle);
        strncpy(handle->reserved, held[at].name, sizeof handle->reserved - 1);
    }
    pthread_mutex_unlock(&lock);
    return said(status);
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags) {
    (void)flags;
    if (!memchr(handle.reserved, 0, sizeof handle.reserved)) return said(INVALID_HANDLE);
    return said(map(out, 0, handle.reserved, OPENED, O_RDWR));
}

cudaError_t cudaIpcCloseMemHandle(void *address) { return said(release(address, OPENED)); }

int cuCtxGetCurrent(void **context) {
    *context = chosen ? &current : NULL;
    return OK;
}

int cuMemGetAddressRange_v2(uint64_t *start, size_t *size, uint64_t address) {
    pthread_mutex_lock(&lock);
    int at = find((void *)(uintptr_t)address);
    if (at >= 0) *start = (uint64_t)(uintptr_t)held[at].at, *size = held[at].size;
    pthread_mutex_unlock(&lock);
    return at >= 0 ? OK : INVALID_VALUE;
}

/* For tests alone: what is held of a kind, and how often bytes were copied. */
unsigned stand_in_held(int kind) {
    unsigned count = 0;
    pthread_mutex_lock(&lock);
    for (int at = 0; at < MOST; at++) count += held[at].kind == kind;
    pthread_mutex_unlock(&lock);
    return count;
}

unsigned stand_in_copies(void) { return copies; }

/* How often the default stream was waited for, and with it all others but those that wait for none. */
unsigned stand_in_waits(void) { return waits; }

/* Begin or end the capture of a graph in the global mode; whether a call of another thread has ended it before. */
int stand_in_capture(int begin) {
    capturing = begin;
    int was = invalidated;
    invalidated = 0;
    return was;
}

/* From now on every call answers an error; 0 for none. */
void stand_in_break(int status) { broken = status; }
