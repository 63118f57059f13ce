// Repeats a run while its input changes faster than it ends, as the values of a slider do.

/**
 * Returns a function that starts a run; called during one, it starts one more at its end.
 *
 * @param {() => Promise} run
 */
export function createRepeat(run) {
  let isRunning = false;
  let isOutdated = false;
  return async () => {
    isOutdated = true;
    if (isRunning) return;
    isRunning = true;
    while (isOutdated) {
      isOutdated = false;
      await run();
    }
    isRunning = false;
  };
}
