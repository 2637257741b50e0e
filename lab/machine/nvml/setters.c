/* What root may set: each value goes to the end of the state file, where its line is the last. */

#include "fake.h"

static nvmlReturn_t set(nvmlDevice_t device, const char *key, const char *value)
{
    char path[4096], line[256];
    if (geteuid() != 0)
        return NO_PERMISSION;
    state_path(path, sizeof path);
    int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0)
        return UNKNOWN;
    int size = snprintf(line, sizeof line, "\ngpu%d.%s=%s\n", device->index, key, value);
    int whole = write(fd, line, (size_t)size) == size;
    close(fd);
    read_state();
    return whole ? SUCCESS : UNKNOWN;
}

static nvmlReturn_t set_u32(nvmlDevice_t device, const char *key, unsigned value)
{
    char text[16];
    snprintf(text, sizeof text, "%u", value);
    return set(device, key, text);
}

EXPORT nvmlReturn_t nvmlDeviceSetPowerManagementLimit(nvmlDevice_t device, unsigned limit)
{
    ENTER(device);
    nvmlReturn_t code = set_u32(device, "power.limit", limit);
    return code != SUCCESS ? code : set_u32(device, "power.enforced_limit", limit);
}

EXPORT nvmlReturn_t nvmlDeviceSetApplicationsClocks(nvmlDevice_t device, unsigned memory,
                                                    unsigned sm)
{
    ENTER(device);
    nvmlReturn_t code = set_u32(device, "clocks.app_memory", memory);
    return code != SUCCESS ? code : set_u32(device, "clocks.app_sm", sm);
}

EXPORT nvmlReturn_t nvmlDeviceSetPersistenceMode(nvmlDevice_t device, unsigned mode)
{
    ENTER(device);
    return set_u32(device, "persistence", mode);
}

EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned mode)
{
    ENTER(device);
    return set_u32(device, "compute_mode", mode);
}

/* No query of NVML tells a lock: the key `clocks.locked` is for whoever reads the file. */
EXPORT nvmlReturn_t nvmlDeviceSetGpuLockedClocks(nvmlDevice_t device, unsigned least,
                                                 unsigned most)
{
    char text[32];
    ENTER(device);
    snprintf(text, sizeof text, "%u,%u", least, most);
    return set(device, "clocks.locked", text);
}
