// Which tactic the calls of an op are to take.
#pragma once

#include <cstdint>

namespace svexport {

// As svexport::_force_tactic said, for tests and for timing tactics one by one; 0: the planner's choice.
int32_t forced_tactic(const char* op);

}  // namespace svexport
