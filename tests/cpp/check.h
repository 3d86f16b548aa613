// The C++ tests' one tool: JOF_CHECK stops the program with the place and the values.
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
