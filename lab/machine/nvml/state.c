/* The state file: what the fake NVML is to say, and where it is to fail or to hang. */

#include "fake.h"

#define MAX_STATE (256 * 1024)
#define MAX_KEYS 8192

static const struct {
    int code;
    const char *name, *text;
} ERRORS[] = {
    {0, "NVML_SUCCESS", "Success"},
    {1, "NVML_ERROR_UNINITIALIZED", "Uninitialized"},
    {2, "NVML_ERROR_INVALID_ARGUMENT", "Invalid Argument"},
    {3, "NVML_ERROR_NOT_SUPPORTED", "Not Supported"},
    {4, "NVML_ERROR_NO_PERMISSION", "Insufficient Permissions"},
    {5, "NVML_ERROR_ALREADY_INITIALIZED", "Already Initialized"},
    {6, "NVML_ERROR_NOT_FOUND", "Not Found"},
    {7, "NVML_ERROR_INSUFFICIENT_SIZE", "Insufficient Size"},
    {8, "NVML_ERROR_INSUFFICIENT_POWER", "Insufficient External Power"},
    {9, "NVML_ERROR_DRIVER_NOT_LOADED", "Driver Not Loaded"},
    {10, "NVML_ERROR_TIMEOUT", "Timeout"},
    {11, "NVML_ERROR_IRQ_ISSUE", "Interrupt Request Issue"},
    {12, "NVML_ERROR_LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"},
    {13, "NVML_ERROR_FUNCTION_NOT_FOUND", "Function Not Found"},
    {14, "NVML_ERROR_CORRUPTED_INFOROM", "Corrupted infoROM"},
    {15, "NVML_ERROR_GPU_IS_LOST", "GPU is lost"},
    {16, "NVML_ERROR_RESET_REQUIRED", "GPU requires restart"},
    {17, "NVML_ERROR_OPERATING_SYSTEM", "The operating system has blocked the request."},
    {18, "NVML_ERROR_LIB_RM_VERSION_MISMATCH", "RM has detected an NVML/RM version mismatch."},
    {19, "NVML_ERROR_IN_USE", "In use by another client"},
    {20, "NVML_ERROR_MEMORY", "Insufficient Memory"},
    {21, "NVML_ERROR_NO_DATA", "No data"},
    {22, "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED", "ECC is enabled on this vGPU"},
    {23, "NVML_ERROR_INSUFFICIENT_RESOURCES", "Insufficient resources"},
    {24, "NVML_ERROR_FREQ_NOT_SUPPORTED", "Frequency not supported"},
    {25, "NVML_ERROR_ARGUMENT_VERSION_MISMATCH", "Argument version mismatch"},
    {26, "NVML_ERROR_DEPRECATED", "The requested functionality has been deprecated"},
    {27, "NVML_ERROR_NOT_READY", "The system is not ready for the request"},
    {28, "NVML_ERROR_GPU_NOT_FOUND", "No GPUs were found"},
    {29, "NVML_ERROR_INVALID_STATE", "Resource not in correct state"},
    {999, "NVML_ERROR_UNKNOWN", "Unknown Error"},
};

static char state_text[MAX_STATE];
static struct {
    const char *key, *value;
} state[MAX_KEYS];
static int state_size, faulty; /* `faulty`: some call hangs or fails */
int initialised;
Device devices[MAX_GPUS];

void state_path(char *out, size_t size)
{
    Dl_info info;
    char *slash;
    out[0] = 0;
    if (!dladdr((void *)state_path, &info) || !info.dli_fname)
        return;
    snprintf(out, size, "%s", info.dli_fname);
    slash = strrchr(out, '/');
    slash = slash ? slash + 1 : out;
    snprintf(slash, size - (size_t)(slash - out), "nvml.state");
}

static char *trim(char *text)
{
    char *end = text + strlen(text);
    while (end > text && isspace((unsigned char)end[-1]))
        *--end = 0;
    while (isspace((unsigned char)*text))
        text++;
    return text;
}

void read_state(void)
{
    char path[4096], *line, *next;
    ssize_t got = 0, more;
    state_path(path, sizeof path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0 && got < MAX_STATE - 1 &&
           (more = read(fd, state_text + got, (size_t)(MAX_STATE - 1 - got))) > 0)
        got += more;
    if (fd >= 0)
        close(fd);
    state_text[got] = 0;
    state_size = faulty = 0;
    for (line = state_text; line && *line && state_size < MAX_KEYS; line = next) {
        char *comment, *equals;
        if ((next = strchr(line, '\n')))
            *next++ = 0;
        if ((comment = strchr(line, '#')))
            *comment = 0;
        if (!(equals = strchr(line, '=')))
            continue;
        *equals = 0;
        state[state_size].key = line = trim(line);
        faulty |= strstr(line, "hang") || strstr(line, "error") || strstr(line, "lost");
        state[state_size++].value = trim(equals + 1);
    }
}

const char *global(const char *key)
{
    for (int i = state_size - 1; i >= 0; i--)
        if (!strcmp(state[i].key, key))
            return state[i].value;
    return NULL;
}

/* `gpu3.KEY`, else `gpu.KEY`, else NULL. */
const char *of_gpu(int gpu, const char *key)
{
    char full[256];
    const char *found;
    if (!state_size)
        return NULL;
    snprintf(full, sizeof full, "gpu%d.%s", gpu, key);
    if ((found = global(full)))
        return found;
    snprintf(full, sizeof full, "gpu.%s", key);
    return global(full);
}

nvmlReturn_t as_error(const char *value)
{
    if (value && !strncmp(value, "NVML_", 5)) {
        for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
            if (!strcmp(value, ERRORS[i].name))
                return ERRORS[i].code;
        return UNKNOWN;
    }
    return SUCCESS;
}

int as_int(const char *value, int otherwise)
{
    return value ? (int)strtol(value, NULL, 0) : otherwise;
}

/* `gpu3.nvlink4.KEY`, else `gpu3.nvlink.KEY` for all links of the GPU. */
const char *of_link(int gpu, unsigned link, const char *key)
{
    char full[128];
    const char *found;
    snprintf(full, sizeof full, "nvlink%u.%s", link, key);
    if ((found = of_gpu(gpu, full)))
        return found;
    snprintf(full, sizeof full, "nvlink.%s", key);
    return of_gpu(gpu, full);
}

static void sleep_for_ever(void)
{
    sigset_t all;
    sigfillset(&all);
    sigprocmask(SIG_BLOCK, &all, NULL);
    for (;;)
        pause();
}

/* `sleep`, or a path to read: on a mount that never answers the caller is then in D state. */
void hang(const char *how)
{
    char byte;
    if (!strcmp(how, "sleep"))
        sleep_for_ever();
    int fd = open(how, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || read(fd, &byte, 1) < 0) /* the mount was ended: the call goes on */
        byte = 0;
    if (fd >= 0)
        close(fd);
}

/* Look up `WHAT.FUNCTION`, with and without the function's version suffix. */
const char *by_function(int gpu, const char *what, const char *function)
{
    char key[256];
    const char *found;
    snprintf(key, sizeof key, "%s.%s", what, function);
    if ((found = gpu < 0 ? global(key) : of_gpu(gpu, key)))
        return found;
    char *suffix = strrchr(key, '_');
    if (!suffix || suffix[1] != 'v')
        return NULL;
    *suffix = 0;
    return gpu < 0 ? global(key) : of_gpu(gpu, key);
}

nvmlReturn_t enter_global(const char *function)
{
    const char *found;
    if (!initialised)
        return UNINITIALIZED;
    if (!faulty)
        return SUCCESS;
    if ((found = by_function(-1, "hang", function)))
        hang(found);
    return as_error(by_function(-1, "error", function));
}

nvmlReturn_t enter(nvmlDevice_t device, const char *function)
{
    const char *found;
    nvmlReturn_t code = enter_global(function);
    if (code != SUCCESS)
        return code;
    if (device < devices || device >= devices + MAX_GPUS)
        return INVALID_ARGUMENT;
    if (!faulty)
        return SUCCESS;
    int gpu = device->index;
    if ((found = of_gpu(gpu, "hang")) || (found = by_function(gpu, "hang", function)))
        hang(found);
    if ((found = of_gpu(gpu, "lost")) && !strcmp(found, "calls"))
        return GPU_IS_LOST;
    return as_error(by_function(gpu, "error", function));
}

static nvmlReturn_t number(int gpu, const char *key, const char *otherwise, long long *out)
{
    const char *value = of_gpu(gpu, key);
    if (!value)
        value = otherwise;
    nvmlReturn_t code = as_error(value);
    if (code == SUCCESS)
        *out = value[0] == '-' ? strtoll(value, NULL, 0) : (long long)strtoull(value, NULL, 0);
    return code;
}

nvmlReturn_t give_u32(nvmlDevice_t device, const char *key, const char *otherwise, unsigned *out)
{
    long long value = 0;
    if (!out)
        return INVALID_ARGUMENT;
    nvmlReturn_t code = number(device->index, key, otherwise, &value);
    if (code == SUCCESS)
        *out = (unsigned)value;
    return code;
}

/* A mode now, and the one after the next reset: the same unless the state says otherwise. */
nvmlReturn_t give_mode(nvmlDevice_t device, const char *key, const char *pending_key,
                       const char *otherwise, unsigned *now, unsigned *pending)
{
    unsigned mode = 0;
    nvmlReturn_t code = give_u32(device, key, otherwise, &mode);
    if (code != SUCCESS)
        return code;
    *now = mode;
    return give_u32(device, pending_key, mode ? "1" : "0", pending);
}

nvmlReturn_t give_u64(nvmlDevice_t device, const char *key, const char *otherwise, u64 *out)
{
    long long value = 0;
    if (!out)
        return INVALID_ARGUMENT;
    nvmlReturn_t code = number(device->index, key, otherwise, &value);
    if (code == SUCCESS)
        *out = (u64)value;
    return code;
}

nvmlReturn_t copy(const char *value, char *out, unsigned size)
{
    nvmlReturn_t code = as_error(value);
    if (code != SUCCESS)
        return code;
    if (!out)
        return INVALID_ARGUMENT;
    if (strlen(value) + 1 > size)
        return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

nvmlReturn_t give_text(nvmlDevice_t device, const char *key, const char *otherwise, char *out,
                       unsigned size)
{
    const char *value = of_gpu(device->index, key);
    return copy(value ? value : otherwise, out, size);
}

const char *error_text(nvmlReturn_t code)
{
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code)
            return ERRORS[i].text;
    return "Unknown Error";
}
