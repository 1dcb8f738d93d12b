// Records every kernel and copy of a program that uses CUDA, whichever library launches it.
//
//     gcc -O2 -shared -fPIC -I$CUDA/include -I$CUDA/extras/CUPTI/include kernel_times.c -o kernel_times.so -lcupti -ldl
//     CUDA_INJECTION64_PATH=$PWD/kernel_times.so KERNEL_TIMES=trace.tsv PROGRAM ..
//
// Each line of the file has the start in ns, the duration in ns, the stream and the name. `kernel_times.py` reads it.
#include <cupti.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#define BYTES (8u << 20)

static FILE *out;

static void request(uint8_t **buffer, size_t *size, size_t *most) {
    *buffer = aligned_alloc(8, BYTES);
    *size = *buffer ? BYTES : 0;
    *most = 0;
}

static void line(uint64_t start, uint64_t end, uint32_t stream, const char *name) {
    fprintf(out, "%" PRIu64 "\t%" PRIu64 "\t%u\t%s\n", start, end - start, stream, name);
}

static void completed(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    (void)context, (void)stream, (void)size;
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        switch (record->kind) {
        case CUPTI_ACTIVITY_KIND_KERNEL:
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: {
            CUpti_ActivityKernel4 *kernel = (CUpti_ActivityKernel4 *)record;
            line(kernel->start, kernel->end, kernel->streamId, kernel->name);
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
            CUpti_ActivityMemcpy *copy = (CUpti_ActivityMemcpy *)record;
            const char *names[] = {"?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD"};
            char name[32];
            snprintf(name, sizeof name, "memcpy %s", copy->copyKind < 9 ? names[copy->copyKind] : "?");
            line(copy->start, copy->end, copy->streamId, name);
            break;
        }
        case CUPTI_ACTIVITY_KIND_MEMSET: {
            CUpti_ActivityMemset *set = (CUpti_ActivityMemset *)record;
            line(set->start, set->end, set->streamId, "memset");
            break;
        }
        default:
            break;
        }
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(1);
    fflush(out);
}

// The driver calls this when a program starts to use CUDA.
int InitializeInjection(void) {
    const char *path = getenv("KERNEL_TIMES");
    out = fopen(path ? path : "kernel_times.tsv", "w");
    if (!out) return 0;
    cuptiActivityRegisterCallbacks(request, completed);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMCPY);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_MEMSET);
    atexit(finish);
    return 1;
}
