/* What the parts of the fake NVML share. */

#ifndef FAKE_NVML_H
#define FAKE_NVML_H

#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64

typedef int nvmlReturn_t;
typedef struct {
    int index;
} Device, *nvmlDevice_t;
typedef unsigned long long u64;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NO_PERMISSION = 4,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
    VERSION_MISMATCH = 25,
    UNKNOWN = 999,
};

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

/* state.c */
extern int initialised;
extern Device devices[MAX_GPUS];
void read_state(void);
void state_path(char *out, size_t size);
const char *error_text(nvmlReturn_t code);
nvmlReturn_t as_error(const char *value); /* SUCCESS where the value is not an error's name */
int as_int(const char *value, int otherwise);
const char *global(const char *key);
const char *of_gpu(int gpu, const char *key); /* `gpu3.KEY`, else `gpu.KEY`, else NULL */
const char *of_link(int gpu, unsigned link, const char *key);
const char *by_function(int gpu, const char *what, const char *function);
void hang(const char *how);
nvmlReturn_t enter_global(const char *function);
nvmlReturn_t enter(nvmlDevice_t device, const char *function);
nvmlReturn_t give_u32(nvmlDevice_t device, const char *key, const char *otherwise, unsigned *out);
nvmlReturn_t give_mode(nvmlDevice_t device, const char *key, const char *pending_key,
                       const char *otherwise, unsigned *now, unsigned *pending);
nvmlReturn_t give_u64(nvmlDevice_t device, const char *key, const char *otherwise, u64 *out);
nvmlReturn_t give_text(nvmlDevice_t device, const char *key, const char *otherwise, char *out,
                       unsigned size);
nvmlReturn_t copy(const char *value, char *out, unsigned size);

/* fake_nvml.c */
void fill_pci(unsigned domain, unsigned bus, unsigned slot, nvmlPciInfo_t *out);

/* What every call does first: hang, or return an error, where the state says so. */
#define ENTER(device)                                                                              \
    do {                                                                                           \
        nvmlReturn_t entered = enter((device), __func__);                                          \
        if (entered != SUCCESS)                                                                    \
            return entered;                                                                        \
    } while (0)
#define ENTER_GLOBAL()                                                                             \
    do {                                                                                           \
        nvmlReturn_t entered = enter_global(__func__);                                             \
        if (entered != SUCCESS)                                                                    \
            return entered;                                                                        \
    } while (0)

/* A call that only gives one number. */
#define GIVE_U32(name, key, otherwise)                                                             \
    EXPORT nvmlReturn_t name(nvmlDevice_t device, unsigned *out)                                   \
    {                                                                                              \
        ENTER(device);                                                                             \
        return give_u32(device, key, otherwise, out);                                              \
    }

#endif
