// The arithmetic of the formats needs the default floating-point environment, whatever the calling thread has set.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace regauge {

/// Round to nearest even and keep subnormals while this object lives (a caller may have asked torch to flush them).
class DefaultFloatEnvironment {
#if defined(__x86_64__)
 public:
  DefaultFloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloatEnvironment() { _mm_setcsr(saved_); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  unsigned saved_;
#elif defined(__aarch64__)
 public:
  DefaultFloatEnvironment() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(0ul));
  }
  ~DefaultFloatEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  unsigned long saved_;
#else
 public:
  DefaultFloatEnvironment() {}
#endif
};

}  // namespace regauge
