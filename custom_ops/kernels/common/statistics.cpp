// The definitions, out of line.
#define BNEXPORT_STATISTICS
#include "statistics_definitions.h"
