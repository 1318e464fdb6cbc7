// What the CUDA compiler knows without being told; the build includes it before everything else.
#pragma once

#define __device__
#define __global__
#define __forceinline__ inline

struct Dim3 {
    unsigned x, y, z;
};
// Of the fiber that runs; set by the scheduler at every switch.
extern Dim3 gridDim, blockIdx, blockDim, threadIdx;

// Dynamic shared memory of the running CTA; the build puts a call of it where a kernel declares `shared`.
char* shared_memory();
