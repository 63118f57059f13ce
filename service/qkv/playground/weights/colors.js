// Maps numbers to colours: blue above 0, orange below. OKLCH gives even steps of perceived lightness.

const SHADE_COUNT = 256;
const NOT_FINITE = [160, 160, 160]; // RGB of NaN and of infinity

/**
 * Creates the shades of numbers.
 *
 * @param {Iterable<number>} numbers the largest of them has the strongest shade
 * @param {Object} options
 * @param {boolean} options.isDark
 * @param {boolean} options.usesRoot the shade is that of a share's square root: small numbers show
 * @param {boolean} options.hasGaps a cell with NaN stays empty
 * @returns {{largest, isSigned, pick, colourOf}} `pick`: the RGB of a share of the largest number, -1
 *   to 1; `colourOf`: the RGB of a number, null for a cell that stays empty
 */
export function createShades(numbers, { isDark, usesRoot = false, hasGaps = false }) {
  const { up, down } = paletteOf(isDark);
  const { largest, isSigned } = rangeOf(numbers);
  const pick = (share) => {
    const ramp = share < 0 ? down : up;
    return ramp[Math.min(SHADE_COUNT - 1, Math.round(Math.abs(share) * (SHADE_COUNT - 1)))];
  };
  const colourOf = (value) => {
    if (value === 0 || (hasGaps && Number.isNaN(value))) return null;
    if (!Number.isFinite(value)) return NOT_FINITE;
    const share = value / largest;
    return pick(usesRoot ? Math.sign(share) * Math.sqrt(Math.abs(share)) : share);
  };
  return { largest, isSigned, pick, colourOf };
}

const palettes = new Map();

/** Returns the colours of a theme: for each sign, the RGB of 256 shares of the largest number. */
function paletteOf(isDark) {
  const createRamp = (sign) =>
    Array.from({ length: SHADE_COUNT }, (_, shade) => [
      ...Uint8ClampedArray.from(colourAt((sign * shade) / (SHADE_COUNT - 1), isDark)),
    ]);
  if (!palettes.has(isDark)) palettes.set(isDark, { up: createRamp(1), down: createRamp(-1) });
  return palettes.get(isDark);
}

/** Returns the largest absolute value of the finite numbers; 0 if there is none. */
export const largestSize = (numbers) => rangeOf(numbers).largest;

function rangeOf(numbers) {
  let [largest, isSigned] = [0, false];
  for (const value of numbers) {
    if (Number.isFinite(value)) largest = Math.max(largest, Math.abs(value));
    if (value < 0) isSigned = true;
  }
  return { largest, isSigned };
}

/** True if dark text has more contrast on a colour than white text (WCAG 2, relative luminance). */
export function isLight(rgb) {
  const linear = rgb.map((u) => (u <= 10 ? u / 3294.6 : ((u / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.183;
}

function colourAt(share, isDark) {
  const size = Math.abs(share);
  const lightness = isDark ? 0.25 + 0.63 * size : 0.965 - 0.6 * size;
  const chroma = 0.012 + 0.065 * Math.sin(Math.PI * size) + 0.063 * size;
  const up = isDark ? 265 - 65 * size : 225 + 45 * size;
  const down = isDark ? 40 + 45 * size : 75 - 40 * size;
  return toSrgb(lightness, chroma, ((share < 0 ? down : up) * Math.PI) / 180);
}

// Ottosson, A perceptual color space for image processing, 2020
function toSrgb(lightness, chroma, hue) {
  const a = chroma * Math.cos(hue);
  const b = chroma * Math.sin(hue);
  const long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const short = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
    -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
    -0.0041960863 * long - 0.7034186147 * medium + 1.707614701 * short,
  ].map((u) => 255 * (u <= 0.0031308 ? 12.92 * u : 1.055 * u ** (1 / 2.4) - 0.055));
}
