// The tests of expression_test.cc if all results have at most 16 bits. Errors are larger then.
#define JOF_NARROW_RESULTS
#include "expression_test.cc"
