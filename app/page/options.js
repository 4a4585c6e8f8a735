// The numbers that a conversation may set, and what the API takes of each. Step 1: whole ones only. Pure.

export const BOUNDS = {
  temperature: { min: 0, max: 2, step: 0.01 },
  top_p: { min: 0, max: 1, step: 0.01 },
  top_k: { min: 0, max: 2 ** 31 - 1, step: 1 },
  max_tokens: { min: 1, max: 2 ** 31, step: 1 },
  repetition_penalty: { min: 0.01, max: 10, step: 0.01 },
  seed: { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }, // larger ones, which the API takes, are not exact here
};

/** Whether the API takes a value of the option of that name. */
export function isTaken(name, value) {
  const { min, max, step } = BOUNDS[name];
  return typeof value === "number" && value >= min && value <= max && (step !== 1 || Number.isSafeInteger(value));
}
