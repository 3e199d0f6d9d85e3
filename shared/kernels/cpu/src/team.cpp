#include "threads.h"

extern "C" void* baton_team_new(const int32_t* cores, int64_t num_cores) {
  return new baton::Team(std::vector<int>(cores, cores + num_cores));
}

extern "C" void baton_team_free(void* team) { delete static_cast<baton::Team*>(team); }
