// JOF_CHECK, which the C++ tests share: stops the program, and prints the location and a message.
#pragma once

#include <cstdio>
#include <cstdlib>

#define JOF_CHECK(condition, ...)                                                 \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "%s:%d: %s failed: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                          \
      std::fprintf(stderr, "\n");                                                 \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)
