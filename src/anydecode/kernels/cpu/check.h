/* Whether a variant agrees with plain C on this machine. */
#ifndef ANYDECODE_CHECK_H
#define ANYDECODE_CHECK_H

#include "layout.h"

/* Return 1 where both variants give the same bits on small random inputs of every format. */
int variants_agree(const Kernels *candidate, const Kernels *plain);

#endif
