/* All kernels for one instruction set; compiled once per set with VARIANT naming it. */
#include "interpreter.h"
#include "truncate.h"

#define NAME2(variant) kernels_##variant
#define NAME(variant) NAME2(variant)
#define TEXT2(variant) #variant
#define TEXT(variant) TEXT2(variant)

const Kernels NAME(VARIANT);
const Kernels NAME(VARIANT) = {TEXT(VARIANT), run,          prefetch,     repack,
                               linear,        unpack_row,   argmax,       top_k,
                               logsumexp,     exponentials, sample_token, sample_truncated};
