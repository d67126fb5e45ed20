#include "table.h"

#include "../processor.h"
#include "convolution/loops.h"

namespace bnexport::cpu {

BNEXPORT_TABLES(TrainingTable, training_table);
BNEXPORT_TABLES(Loops, loops);

const TrainingTable& training_table() { return BNEXPORT_CHOSEN(training_table); }
const Loops& loops() { return BNEXPORT_CHOSEN(loops); }

}  // namespace bnexport::cpu
