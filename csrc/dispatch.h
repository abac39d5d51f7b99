// Which build of the kernel runs on this machine, and how many threads it may use.
#pragma once
#include "heads.h"
#include "problem.h"

namespace attemper {

// Name of the instruction set in use: "avx512bf16" (which multiplies bfloat16 in pairs), "avx512", "avx2", "neon" or "portable".
const char* instruction_set();

// Whether the build in use rounds weights to bfloat16 where values are bfloat16; see sum_flow in gradients.h.
bool rounds_weights();

// Chooses by name; "" chooses the best that this processor has. False where there is no such build or the processor lacks it.
bool choose_instruction_set(const char* name);

// Run the chosen build; false where memory ran out. In a forked child both use one thread: OpenMP's pool did not survive the
// fork.
bool forward(Problem problem);
bool backward(Problem problem);

// Rows of a record to heads: plain code, the same for every instruction set. In a forked child it uses one thread too.
void reduce_rows(Reduction reduction);

}  // namespace attemper
