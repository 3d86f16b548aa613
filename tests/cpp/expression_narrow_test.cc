// Where all results have 16 bits or fewer, a CPU computes what it does elsewhere.
#define JOF_NARROW_RESULTS
#include "expression_test.cc"
