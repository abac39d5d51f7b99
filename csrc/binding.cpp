// The one file that knows Python: problems come in as packed bytes, in the order of problem.h and heads.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstring>
#include <new>
#include <stdexcept>

#include "dispatch.h"

namespace nb = nanobind;

namespace {

template <class Record>
Record unpacked(nb::bytes packed) {
  Record problem;
  if (packed.size() != sizeof(problem))
    throw std::invalid_argument("a packed problem has " + std::to_string(sizeof(problem)) + " bytes");
  memcpy(&problem, packed.c_str(), sizeof(problem));
  return problem;
}

void run(nb::bytes packed, bool (*pass)(attemper::Problem)) {
  const auto problem = unpacked<attemper::Problem>(packed);
  nb::gil_scoped_release release;
  if (!pass(problem)) throw std::bad_alloc();
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.def("forward", [](nb::bytes packed) { run(packed, attemper::forward); });
  m.def("backward", [](nb::bytes packed) { run(packed, attemper::backward); });
  m.def("reduce_rows", [](nb::bytes packed) {
    const auto reduction = unpacked<attemper::Reduction>(packed);
    nb::gil_scoped_release release;
    attemper::reduce_rows(reduction);
  });
  m.def("instruction_set", [] { return std::string(attemper::instruction_set()); });
  m.def("rounds_weights", [] { return attemper::rounds_weights(); });
  m.def("choose_instruction_set", [](const std::string& name) { return attemper::choose_instruction_set(name.c_str()); });
}
