// The tests of expression_test.cc also pass on a CPU if all results have at most 16 bits.
#define JOF_NARROW_RESULTS
#include "expression_test.cc"
