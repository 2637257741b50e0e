/* A libnvidia-ml.so.1 for tests: it answers as NVML does on a healthy H100 node, or as told.
 *
 * What it says comes from the text file `nvml.state` in the directory of the library, read at every
 * nvmlInit: one `key=value` a line, `#` begins a comment, the last line of a key wins. An empty or
 * missing file is eight healthy GPUs. The keys are in docs/lab.md; the ones of a GPU are written
 * `gpu3.KEY`, or `gpu.KEY` for all of them. Where a value is the name of an NVML error
 * (`gpu3.ecc.enabled=NVML_ERROR_NOT_SUPPORTED`), the query returns that error.
 *
 * Signatures and struct versions are those of NVML's public API. `cc -shared -fPIC`, no libraries.
 */

#include "fake.h"

static int gpu_count;
static int shown[MAX_GPUS]; /* NVML's index -> ours: a GPU that is off the bus leaves a gap */

static void uuid_of(int gpu, char *out, size_t size)
{
    const char *value = of_gpu(gpu, "uuid");
    if (value)
        snprintf(out, size, "%s", value);
    else
        snprintf(out, size, "GPU-00000000-0000-4000-8000-%012x", gpu);
}

static void serial_of(int gpu, char *out, size_t size)
{
    const char *value = of_gpu(gpu, "serial");
    if (value)
        snprintf(out, size, "%s", value);
    else
        snprintf(out, size, "1650000000%03d", gpu);
}

static void pci_of(int gpu, unsigned *domain, unsigned *bus, unsigned *slot)
{
    const char *value = of_gpu(gpu, "pci");
    *domain = 0;
    *bus = 0x1bu + 3u * (unsigned)gpu;
    *slot = 0;
    if (value)
        sscanf(value, "%x:%x:%x", domain, bus, slot);
}

/* -- init ------------------------------------------------------------------------------------ */

static nvmlReturn_t init(void)
{
    const char *found;
    read_state();
    if ((found = global("hang")) || (found = by_function(-1, "hang", "nvmlInit")))
        hang(found);
    nvmlReturn_t code = as_error(global("init"));
    if (code != SUCCESS)
        return code;
    int wanted = as_int(global("count"), 8);
    gpu_count = 0;
    for (int gpu = 0; gpu < wanted && gpu < MAX_GPUS; gpu++) {
        devices[gpu].index = gpu;
        if (!(found = of_gpu(gpu, "lost")) || strcmp(found, "absent"))
            shown[gpu_count++] = gpu;
    }
    initialised++;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return init(); }
EXPORT nvmlReturn_t nvmlInit(void) { return init(); }
EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    return init();
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
    if (!initialised)
        return UNINITIALIZED;
    initialised--;
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) { return error_text(code); }

/* -- the system ------------------------------------------------------------------------------ */

static const char *driver(void)
{
    const char *value = global("driver");
    return value ? value : "570.133.20";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size)
{
    ENTER_GLOBAL();
    return copy(driver(), out, size);
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned size)
{
    char text[80];
    ENTER_GLOBAL();
    const char *value = global("nvml");
    snprintf(text, sizeof text, "12.%s", driver());
    return copy(value ? value : text, out, size);
}

static nvmlReturn_t cuda(const char *function, int *out)
{
    nvmlReturn_t code = enter_global(function);
    if (code != SUCCESS || (code = as_error(global("cuda"))) != SUCCESS)
        return code;
    *out = as_int(global("cuda"), 12080);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *out) { return cuda(__func__, out); }
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out) { return cuda(__func__, out); }

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *out)
{
    ENTER_GLOBAL();
    *out = (unsigned)gpu_count;
    return SUCCESS;
}

/* -- handles --------------------------------------------------------------------------------- */

static nvmlReturn_t handle(int gpu, const char *function, nvmlDevice_t *out)
{
    const char *lost = of_gpu(gpu, "lost");
    if (lost && !strcmp(lost, "handle"))
        return GPU_IS_LOST;
    nvmlReturn_t code = as_error(lost);
    if (code == SUCCESS)
        code = as_error(by_function(gpu, "error", function));
    if (code == SUCCESS)
        *out = &devices[gpu];
    return code;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out)
{
    ENTER_GLOBAL();
    if (index >= (unsigned)gpu_count)
        return INVALID_ARGUMENT;
    return handle(shown[index], __func__, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *wanted, nvmlDevice_t *out)
{
    unsigned domain, bus, slot, d, b, s;
    ENTER_GLOBAL();
    if (!wanted || sscanf(wanted, "%x:%x:%x", &domain, &bus, &slot) != 3)
        return INVALID_ARGUMENT;
    for (int i = 0; i < gpu_count; i++) {
        pci_of(shown[i], &d, &b, &s);
        if (d == domain && b == bus && s == slot)
            return handle(shown[i], __func__, out);
    }
    return NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *wanted, nvmlDevice_t *out)
{
    char uuid[96];
    ENTER_GLOBAL();
    for (int i = 0; wanted && i < gpu_count; i++) {
        uuid_of(shown[i], uuid, sizeof uuid);
        if (!strcmp(uuid, wanted))
            return handle(shown[i], __func__, out);
    }
    return NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *wanted, nvmlDevice_t *out)
{
    char serial[64];
    ENTER_GLOBAL();
    for (int i = 0; wanted && i < gpu_count; i++) {
        serial_of(shown[i], serial, sizeof serial);
        if (!strcmp(serial, wanted))
            return handle(shown[i], __func__, out);
    }
    return NOT_FOUND;
}

/* -- who it is ------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *out)
{
    ENTER(device);
    for (int i = 0; i < gpu_count; i++)
        if (shown[i] == device->index)
            *out = (unsigned)i;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *out)
{
    char otherwise[16];
    ENTER(device);
    snprintf(otherwise, sizeof otherwise, "%d", device->index);
    return give_u32(device, "minor", otherwise, out);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *out, unsigned size)
{
    ENTER(device);
    return give_text(device, "name", "NVIDIA H100 80GB HBM3", out, size);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *out, unsigned size)
{
    char text[96];
    ENTER(device);
    uuid_of(device->index, text, sizeof text);
    return copy(text, out, size);
}

EXPORT nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *out, unsigned size)
{
    char text[64];
    ENTER(device);
    serial_of(device->index, text, sizeof text);
    return copy(text, out, size);
}

EXPORT nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *out, unsigned size)
{
    ENTER(device);
    return give_text(device, "vbios", "96.00.99.00.01", out, size);
}

EXPORT nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *out, unsigned size)
{
    ENTER(device);
    return give_text(device, "part", "692-2G520-0200-000", out, size);
}

GIVE_U32(nvmlDeviceGetArchitecture, "architecture", "9") /* Hopper */

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    ENTER(device);
    nvmlReturn_t code = give_u32(device, "compute.major", "9", (unsigned *)major);
    return code != SUCCESS ? code : give_u32(device, "compute.minor", "0", (unsigned *)minor);
}

void fill_pci(unsigned domain, unsigned bus, unsigned slot, nvmlPciInfo_t *out)
{
    memset(out, 0, sizeof *out);
    out->domain = domain;
    out->bus = bus;
    out->device = slot;
    snprintf(out->legacy, sizeof out->legacy, "%04X:%02X:%02X.0", domain & 0xffff, bus & 0xff,
             slot & 0xff);
    snprintf(out->busId, sizeof out->busId, "%08X:%02X:%02X.0", domain, bus & 0xff, slot & 0xff);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *out)
{
    unsigned domain, bus, slot;
    ENTER(device);
    pci_of(device->index, &domain, &bus, &slot);
    fill_pci(domain, bus, slot, out);
    out->pciDeviceId = 0x233010de;
    out->pciSubSystemId = 0x16c110de;
    return SUCCESS;
}

/* -- modes ----------------------------------------------------------------------------------- */

GIVE_U32(nvmlDeviceGetPersistenceMode, "persistence", "1")
GIVE_U32(nvmlDeviceGetComputeMode, "compute_mode", "0")

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *now, unsigned *pending)
{
    ENTER(device);
    return give_mode(device, "mig", "mig_pending", "0", now, pending);
}
