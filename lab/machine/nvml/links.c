/* NVLink, the fabric, and the fields that are asked for by number. */

#include "fake.h"

#define MAX_LINKS 18

static int link_count(int gpu) { return as_int(of_gpu(gpu, "nvlink.count"), MAX_LINKS); }

static nvmlReturn_t link_value(nvmlDevice_t device, unsigned link, const char *key,
                               const char *otherwise, u64 *out)
{
    if (link >= (unsigned)link_count(device->index))
        return link_count(device->index) ? INVALID_ARGUMENT : NOT_SUPPORTED;
    const char *value = of_link(device->index, link, key);
    if (!value)
        value = otherwise;
    nvmlReturn_t code = as_error(value);
    if (code == SUCCESS)
        *out = strtoull(value, NULL, 0);
    return code;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *out)
{
    u64 value = 0;
    ENTER(device);
    nvmlReturn_t code = link_value(device, link, "active", "1", &value);
    *out = (unsigned)value;
    return code;
}

/* An inactive link has no version and no other end. */
static nvmlReturn_t must_be_active(nvmlDevice_t device, unsigned link)
{
    u64 active = 0;
    nvmlReturn_t code = link_value(device, link, "active", "1", &active);
    return code == SUCCESS && !active ? NOT_SUPPORTED : code;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *out)
{
    u64 value = 0;
    ENTER(device);
    nvmlReturn_t code = must_be_active(device, link);
    if (code == SUCCESS)
        code = link_value(device, link, "version", "6", &value); /* NVML_NVLINK_VERSION_4_0 */
    *out = (unsigned)value;
    return code;
}

/* Four NVSwitches, as on an HGX H100 board: 0000:05:00.0 … 0000:08:00.0. */
EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link,
                                                        nvmlPciInfo_t *out)
{
    unsigned domain = 0, bus = 5 + link % 4, slot = 0;
    ENTER(device);
    nvmlReturn_t code = must_be_active(device, link);
    const char *value = of_link(device->index, link, "remote");
    if (code != SUCCESS || (code = as_error(value)) != SUCCESS)
        return code;
    if (value)
        sscanf(value, "%x:%x:%x", &domain, &bus, &slot);
    fill_pci(domain, bus, slot, out);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link,
                                                    unsigned counter, u64 *out)
{
    static const char *const keys[5] = {"replay", "recovery", "crc_flit", "crc_data", "ecc_data"};
    ENTER(device);
    if (counter > 4)
        return INVALID_ARGUMENT;
    return link_value(device, link, keys[counter], counter == 4 ? "NVML_ERROR_NOT_SUPPORTED" : "0",
                      out);
}

typedef struct {
    unsigned char clusterUuid[16];
    nvmlReturn_t status;
    uint32_t cliqueId;
    unsigned state;
} nvmlGpuFabricInfo_t;

typedef struct {
    unsigned version;
    nvmlGpuFabricInfo_t info;
    uint32_t healthMask;
    unsigned char healthSummary; /* version 3 only */
} nvmlGpuFabricInfoV_t;

static nvmlReturn_t fabric(nvmlDevice_t device, nvmlGpuFabricInfo_t *out)
{
    const char *status = of_gpu(device->index, "fabric.status");
    memset(out, 0, sizeof *out);
    nvmlReturn_t code = give_u32(device, "fabric.state", "3", &out->state); /* completed */
    if (code == SUCCESS)
        code = give_u32(device, "fabric.clique", "0", &out->cliqueId);
    out->status = as_error(status); /* an error here is an answer, not the call's failure */
    return code;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t device, nvmlGpuFabricInfo_t *out)
{
    ENTER(device);
    return fabric(device, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t device, nvmlGpuFabricInfoV_t *out)
{
    ENTER(device);
    if (out->version != 0x02000024 && out->version != 0x3000028)
        return VERSION_MISMATCH;
    nvmlReturn_t code = fabric(device, &out->info);
    if (code == SUCCESS)
        code = give_u32(device, "fabric.health", "0", &out->healthMask);
    if (code == SUCCESS && out->version == 0x3000028) {
        unsigned summary = 0;
        code = give_u32(device, "fabric.summary", "0", &summary);
        out->healthSummary = (unsigned char)summary;
    }
    return code;
}

/* -- fields ---------------------------------------------------------------------------------- */

typedef struct {
    uint32_t fieldId, scopeId;
    int64_t timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    union {
        double d;
        unsigned ui;
        unsigned long ul;
        u64 ull;
        long long sll;
        int si;
        unsigned short us;
    } value;
} nvmlFieldValue_t;

enum { UNSIGNED_INT = 1, UNSIGNED_LONG_LONG = 3, SIGNED_INT = 5 };

static const struct {
    uint32_t id;
    const char *key, *otherwise;
    unsigned type;
} FIELDS[] = {
    {1, "ecc.enabled", "1", UNSIGNED_INT},
    {2, "ecc.pending", "1", UNSIGNED_INT},
    {3, "ecc.volatile_corrected", "0", UNSIGNED_LONG_LONG},
    {4, "ecc.volatile_uncorrected", "0", UNSIGNED_LONG_LONG},
    {5, "ecc.aggregate_corrected", "0", UNSIGNED_LONG_LONG},
    {6, "ecc.aggregate_uncorrected", "0", UNSIGNED_LONG_LONG},
    {29, "retired.single", "NVML_ERROR_NOT_SUPPORTED", UNSIGNED_LONG_LONG},
    {30, "retired.double", "NVML_ERROR_NOT_SUPPORTED", UNSIGNED_LONG_LONG},
    {31, "retired.pending", "NVML_ERROR_NOT_SUPPORTED", UNSIGNED_INT},
    {82, "temperature.memory", "44", UNSIGNED_INT},
    {91, "nvlink.count", "18", UNSIGNED_INT},
    {94, "pcie.replays", "0", UNSIGNED_INT},
    {142, "remap.corrected", "0", UNSIGNED_INT},
    {143, "remap.uncorrected", "0", UNSIGNED_INT},
    {144, "remap.pending", "0", UNSIGNED_INT},
    {145, "remap.failed", "0", UNSIGNED_INT},
    {193, "temperature.shutdown_tlimit", "-8", SIGNED_INT},
    {194, "temperature.slowdown_tlimit", "-2", SIGNED_INT},
    {195, "temperature.memory_tlimit", "0", SIGNED_INT},
    {196, "temperature.gpu_tlimit", "0", SIGNED_INT},
    {230, "recovery_action", "0", UNSIGNED_INT},
};

/* `gpu3.nvlink4.field.213` for a link's field, `gpu3.field.ID` for any other. */
static void give_field(int gpu, nvmlFieldValue_t *field)
{
    char key[64];
    long long value = 0;
    const char *found, *otherwise = "NVML_ERROR_NOT_SUPPORTED";
    field->valueType = UNSIGNED_LONG_LONG;
    snprintf(key, sizeof key, "field.%u", field->fieldId);
    found = of_link(gpu, field->scopeId, key);
    if (!found)
        found = of_gpu(gpu, key);
    for (size_t i = 0; i < sizeof FIELDS / sizeof *FIELDS; i++)
        if (FIELDS[i].id == field->fieldId) {
            if (!found)
                found = of_gpu(gpu, FIELDS[i].key);
            otherwise = FIELDS[i].otherwise;
            field->valueType = FIELDS[i].type;
        }
    if (!found)
        found = otherwise;
    field->nvmlReturn = as_error(found);
    if (field->nvmlReturn == SUCCESS)
        value = found[0] == '-' ? strtoll(found, NULL, 0) : (long long)strtoull(found, NULL, 0);
    field->value.sll = value;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count,
                                             nvmlFieldValue_t *values)
{
    ENTER(device);
    if (count < 0 || !values)
        return INVALID_ARGUMENT;
    for (int i = 0; i < count; i++)
        give_field(device->index, &values[i]);
    return SUCCESS;
}
