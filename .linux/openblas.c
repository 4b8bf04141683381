/* Forwards the three BLAS products that libmlx imports to OpenBLAS.
 * The mlx-cpu wheel brings the reference BLAS, about ten times slower; this library is linked before libmlx and so wins symbol
 * resolution. PyPI's OpenBLAS prefixes its symbols with `scipy_`, hence the forwarding. */
#include <malloc.h>

/* MLX's CPU backend gives every activation back to malloc. By default glibc maps and unmaps each one of 128 KiB and more, and the
 * kernel clears its pages every time; these limits let it keep and reuse them. */
__attribute__((constructor)) static void keep_freed_memory(void) {
  mallopt(M_MMAP_THRESHOLD, 32 << 20);
  mallopt(M_TRIM_THRESHOLD, 512 << 20);
}

#define FORWARD(name, scalar, pointer)                                                                                          \
  void scipy_cblas_##name(int order, int ta, int tb, int m, int n, int k, scalar alpha, pointer a, int lda, pointer b, int ldb, \
                          scalar beta, void* c, int ldc);                                                                       \
  void cblas_##name(int order, int ta, int tb, int m, int n, int k, scalar alpha, pointer a, int lda, pointer b, int ldb,       \
                    scalar beta, void* c, int ldc) {                                                                            \
    scipy_cblas_##name(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                                            \
  }

FORWARD(sgemm, float, const void*)
FORWARD(dgemm, double, const void*)
FORWARD(cgemm, const void*, const void*)
