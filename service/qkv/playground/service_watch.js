// Waits for a service that has gone, such as one that is restarted.

const PERIOD_MS = 2000;
let timer = 0;

/** Calls back once the service is ready again. */
export function whenReady(callback) {
  clearTimeout(timer);
  const ask = async () => {
    const isReady = await fetch("/readyz").then(
      ({ ok }) => ok,
      () => false,
    );
    if (isReady) callback();
    else timer = setTimeout(ask, PERIOD_MS);
  };
  timer = setTimeout(ask, PERIOD_MS);
}
