/* Whether a variant agrees with plain C on this machine. */
#ifndef ANYDECODE_CHECK_H
#define ANYDECODE_CHECK_H

#include "layout.h"

/* 1 where both give the same bits on small random products of every format. */
int variants_agree(const Kernels *candidate, const Kernels *plain);

#endif
