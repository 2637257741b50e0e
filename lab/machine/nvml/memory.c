/* Memory of a GPU: who uses it, its errors, remapped rows, retired pages. */

#include "fake.h"

/* -- memory and processes -------------------------------------------------------------------- */

typedef struct {
    u64 total, free, used;
} nvmlMemory_t;
typedef struct {
    unsigned version;
    u64 total, reserved, free, used;
} nvmlMemory_v2_t;

static nvmlReturn_t memory(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    nvmlReturn_t code = give_u64(device, "memory.total", "85520809984", &out->total);
    if (code == SUCCESS)
        code = give_u64(device, "memory.reserved", "666894336", &out->reserved);
    if (code == SUCCESS)
        code = give_u64(device, "memory.used", "524288", &out->used);
    if (code == SUCCESS)
        out->free = out->total - out->reserved - out->used;
    return code;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *out)
{
    ENTER(device);
    if (out->version != 0x02000028)
        return VERSION_MISMATCH;
    return memory(device, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *out)
{
    nvmlMemory_v2_t all = {0, 0, 0, 0, 0};
    ENTER(device);
    nvmlReturn_t code = memory(device, &all);
    out->total = all.total;
    out->free = all.free;
    out->used = all.used + all.reserved; /* the old call counts the driver's share as used */
    return code;
}

typedef struct {
    unsigned pid;
    u64 used;
    unsigned gpuInstance, computeInstance;
} nvmlProcessInfo_t;

/* The value is `PID:BYTES,PID:BYTES`; without `:BYTES` the memory is not told. */
static nvmlReturn_t processes(nvmlDevice_t device, const char *key, unsigned *count,
                              nvmlProcessInfo_t *out)
{
    const char *text = of_gpu(device->index, key);
    nvmlReturn_t code = as_error(text);
    unsigned found = 0, room = count ? *count : 0;
    if (code != SUCCESS)
        return code;
    if (!count)
        return INVALID_ARGUMENT;
    while (text && *text) {
        char *end;
        unsigned pid = (unsigned)strtoul(text, &end, 10);
        u64 used = ~0ull;
        if (end == text)
            break;
        if (*end == ':')
            used = strtoull(end + 1, &end, 0);
        if (found < room && out)
            out[found] = (nvmlProcessInfo_t){pid, used, ~0u, ~0u};
        found++;
        text = *end == ',' ? end + 1 : end;
    }
    *count = found;
    return found > (out ? room : 0) ? INSUFFICIENT_SIZE : SUCCESS;
}

#define PROCESSES(name, key)                                                                       \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *out)         \
    {                                                                                              \
        ENTER(device);                                                                             \
        return processes(device, key, count, out);                                                 \
    }
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, "processes")
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, "processes")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, "processes.graphics")
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v2, "processes.graphics")

/* -- ECC, remapped rows, retired pages ------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *now, unsigned *pending)
{
    ENTER(device);
    return give_mode(device, "ecc.enabled", "ecc.pending", "1", now, pending);
}

static const char *const ECC_KEYS[2][2] = {
    {"ecc.volatile_corrected", "ecc.aggregate_corrected"},
    {"ecc.volatile_uncorrected", "ecc.aggregate_uncorrected"},
};

EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type,
                                                unsigned counter, u64 *out)
{
    ENTER(device);
    if (type > 1 || counter > 1)
        return INVALID_ARGUMENT;
    return give_u64(device, ECC_KEYS[type][counter], "0", out);
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type,
                                                    unsigned counter, unsigned location, u64 *out)
{
    ENTER(device);
    if (type > 1 || counter > 1)
        return INVALID_ARGUMENT;
    if (location != 2 && location != 7) /* Ampere and later tell device memory and SRAM only */
        return NOT_SUPPORTED;
    if (location == 7) {
        *out = 0;
        return SUCCESS;
    }
    return give_u64(device, ECC_KEYS[type][counter], "0", out);
}

typedef struct {
    unsigned version;
    u64 aggregateUncParity, aggregateUncSecDed, aggregateCor;
    u64 volatileUncParity, volatileUncSecDed, volatileCor;
    u64 bucketL2, bucketSm, bucketPcie, bucketMcu, bucketOther;
    unsigned bThresholdExceeded;
} nvmlEccSramErrorStatus_t;

EXPORT nvmlReturn_t nvmlDeviceGetSramEccErrorStatus(nvmlDevice_t device,
                                                    nvmlEccSramErrorStatus_t *out)
{
    ENTER(device);
    if (out->version != 0x1000068)
        return VERSION_MISMATCH;
    memset((char *)out + sizeof out->version, 0, sizeof *out - sizeof out->version);
    return give_u32(device, "ecc.sram_threshold_exceeded", "0", &out->bThresholdExceeded);
}

EXPORT nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected,
                                              unsigned *uncorrected, unsigned *pending,
                                              unsigned *failed)
{
    ENTER(device);
    nvmlReturn_t code = give_u32(device, "remap.corrected", "0", corrected);
    if (code == SUCCESS)
        code = give_u32(device, "remap.uncorrected", "0", uncorrected);
    if (code == SUCCESS)
        code = give_u32(device, "remap.pending", "0", pending);
    return code != SUCCESS ? code : give_u32(device, "remap.failed", "0", failed);
}

typedef struct {
    unsigned max, high, partial, low, none;
} nvmlRowRemapperHistogramValues_t;

EXPORT nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device,
                                                      nvmlRowRemapperHistogramValues_t *out)
{
    ENTER(device);
    nvmlReturn_t code = give_u32(device, "remap.high", "0", &out->high);
    if (code == SUCCESS)
        code = give_u32(device, "remap.partial", "0", &out->partial);
    if (code == SUCCESS)
        code = give_u32(device, "remap.low", "0", &out->low);
    if (code == SUCCESS)
        code = give_u32(device, "remap.none", "0", &out->none);
    if (code == SUCCESS) /* the 2560 banks of an H100 that the others leave */
        out->max = 2560 - out->high - out->partial - out->low - out->none;
    return code;
}

/* Not known on Ampere and later, which remap rows instead. */
EXPORT nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t device, unsigned cause, unsigned *count,
                                              u64 *out)
{
    unsigned pages = 0, room = count ? *count : 0;
    ENTER(device);
    if (cause > 1 || !count)
        return INVALID_ARGUMENT;
    nvmlReturn_t code = give_u32(device, cause ? "retired.double" : "retired.single",
                                 "NVML_ERROR_NOT_SUPPORTED", &pages);
    if (code != SUCCESS)
        return code;
    *count = pages;
    if (pages > (out ? room : 0))
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < pages; i++)
        out[i] = 0x10000ull * (i + 1);
    return SUCCESS;
}

GIVE_U32(nvmlDeviceGetRetiredPagesPendingStatus, "retired.pending", "NVML_ERROR_NOT_SUPPORTED")
