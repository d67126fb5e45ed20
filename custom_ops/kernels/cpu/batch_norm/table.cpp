#include "table.h"

#include "../processor.h"

namespace bnexport::cpu {

using Tables = Table[4];
BNEXPORT_TABLES(Tables, tables);

const Table& table(int32_t dtype) { return BNEXPORT_CHOSEN(tables)[dtype]; }

}  // namespace bnexport::cpu
