#include <exception>

#include "threads.h"

// Null where the system does not start that many threads.
extern "C" void* baton_team_new(const int32_t* cores, int64_t num_cores) {
  try {
    return new baton::Team(std::vector<int>(cores, cores + num_cores));
  } catch (const std::exception&) {
    return nullptr;
  }
}

extern "C" void baton_team_free(void* team) { delete static_cast<baton::Team*>(team); }
