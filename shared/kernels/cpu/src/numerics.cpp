// What decides about the bits of a result: the version of the sums, and the instructions that compute them.
#include "amx.h"
#include "vec.h"

// Raised by every change that gives other bits for the same inputs. tests/kernels/cpu/test_numerics.py notices them.
#define BATON_SUMS "1"

extern "C" const char* baton_numerics() {
#ifdef BATON_HAS_AMX
  if (baton::amx::permitted()) return BATON_SUMS "/amx";
#endif
#ifdef __AVX512BF16__
  return BATON_SUMS "/avx512_bf16";
#else
  return BATON_SUMS "/fma";  // by AVX512 and by AVX2
#endif
}
