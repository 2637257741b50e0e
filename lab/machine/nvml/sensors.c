/* Clocks, temperature, power and PCIe of a GPU. */

#include "fake.h"

/* -- clocks, temperature, power -------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, u64 *out)
{
    ENTER(device);
    return give_u64(device, "throttle", "0x1", out); /* idle */
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, u64 *out)
{
    ENTER(device);
    return give_u64(device, "throttle", "0x1", out);
}

/* Of graphics, SM, memory, video; the last two rows are the application clocks. */
static const char *const CLOCK_KEYS[4][4] = {
    {"clocks.sm", "clocks.sm", "clocks.memory", "clocks.video"},
    {"clocks.max_sm", "clocks.max_sm", "clocks.max_memory", "clocks.max_video"},
    {"clocks.app_sm", "clocks.app_sm", "clocks.app_memory", ""},
    {"clocks.default_app_sm", "clocks.default_app_sm", "clocks.default_app_memory", ""},
};
static const char *const CLOCK_VALUES[4][4] = {
    {"345", "345", "2619", "765"},
    {"1980", "1980", "2619", "1545"},
    {"1980", "1980", "2619", ""},
    {"1980", "1980", "2619", ""},
};

static nvmlReturn_t clock_of(nvmlDevice_t device, int row, unsigned type, unsigned *out)
{
    if (type > 3)
        return INVALID_ARGUMENT;
    if (!*CLOCK_KEYS[row][type])
        return NOT_SUPPORTED;
    return give_u32(device, CLOCK_KEYS[row][type], CLOCK_VALUES[row][type], out);
}

#define CLOCK(name, row)                                                                           \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned type, unsigned *out)                    \
    {                                                                                              \
        ENTER(device);                                                                             \
        return clock_of(device, row, type, out);                                                   \
    }
CLOCK(nvmlDeviceGetClockInfo, 0)
CLOCK(nvmlDeviceGetMaxClockInfo, 1)
CLOCK(nvmlDeviceGetApplicationsClock, 2)
CLOCK(nvmlDeviceGetDefaultApplicationsClock, 3)

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *out)
{
    ENTER(device);
    return sensor ? INVALID_ARGUMENT : give_u32(device, "temperature.gpu", "34", out);
}

typedef struct {
    unsigned version, sensor;
    int temperature;
} nvmlTemperature_t;

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *out)
{
    ENTER(device);
    if (out->version != 0x100000C)
        return VERSION_MISMATCH;
    return out->sensor ? INVALID_ARGUMENT
                       : give_u32(device, "temperature.gpu", "34", (unsigned *)&out->temperature);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned which,
                                                      unsigned *out)
{
    ENTER(device);
    switch (which) {
    case 0: return give_u32(device, "temperature.shutdown", "92", out);
    case 1: return give_u32(device, "temperature.slowdown", "89", out);
    case 2: return give_u32(device, "temperature.memory_max", "95", out);
    case 3: return give_u32(device, "temperature.gpu_max", "87", out);
    default: return which < 8 ? NOT_SUPPORTED : INVALID_ARGUMENT;
    }
}

typedef struct {
    unsigned version;
    int margin;
} nvmlMarginTemperature_t;

EXPORT nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t device,
                                                   nvmlMarginTemperature_t *out)
{
    unsigned now = 0;
    char otherwise[16];
    ENTER(device);
    if (out->version != 0x1000008)
        return VERSION_MISMATCH;
    nvmlReturn_t code = give_u32(device, "temperature.gpu", "34", &now);
    if (code != SUCCESS)
        return code;
    snprintf(otherwise, sizeof otherwise, "%d", 87 - (int)now); /* to the highest operating one */
    return give_u32(device, "temperature.margin", otherwise, (unsigned *)&out->margin);
}

GIVE_U32(nvmlDeviceGetPowerUsage, "power.draw", "72000")
GIVE_U32(nvmlDeviceGetPowerManagementLimit, "power.limit", "700000")
GIVE_U32(nvmlDeviceGetPowerManagementDefaultLimit, "power.default_limit", "700000")
GIVE_U32(nvmlDeviceGetEnforcedPowerLimit, "power.enforced_limit", "700000")

typedef struct {
    u64 reference, violation;
} nvmlViolationTime_t;

/* Nanoseconds of slowing down for a policy, of which only the thermal one is served. */
EXPORT nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned policy,
                                                 nvmlViolationTime_t *out)
{
    ENTER(device);
    if (policy != 1)
        return NOT_SUPPORTED;
    out->reference = 0;
    return give_u64(device, "violation.thermal", "0", &out->violation);
}

/* -- PCIe ------------------------------------------------------------------------------------ */

GIVE_U32(nvmlDeviceGetCurrPcieLinkGeneration, "pcie.generation", "5")
GIVE_U32(nvmlDeviceGetMaxPcieLinkGeneration, "pcie.max_generation", "5")
GIVE_U32(nvmlDeviceGetGpuMaxPcieLinkGeneration, "pcie.gpu_max_generation", "5")
GIVE_U32(nvmlDeviceGetCurrPcieLinkWidth, "pcie.width", "16")
GIVE_U32(nvmlDeviceGetMaxPcieLinkWidth, "pcie.max_width", "16")
GIVE_U32(nvmlDeviceGetPcieReplayCounter, "pcie.replays", "0")
