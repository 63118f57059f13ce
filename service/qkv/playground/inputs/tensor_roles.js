// The roles of tensors: the inputs of a request that they are for. Adds tensors to those of the page.
//
// A tensor of the page is {name, role, tensor, isUploaded, isChosen, isRandom, file}:
//   role: names of inputs such as "key, value", or "unused"
//   isUploaded: the user brought it; isChosen: the user chose its role
//   isRandom: the page drew it; file: name of its .npy file

import { missingInputs } from "./request_inputs.js";

const ALL = "query, key, value";
const KEY_AND_VALUE = "key, value";
export const UNUSED = "unused";

// of tensors whose names say nothing, by their number
const GUESSES = { 1: [ALL], 2: ["query", KEY_AND_VALUE], 3: ["query", "key", "value"] };

/** Returns the roles that a tensor can have, for any variant of the catalogue. */
export function listRoles({ variants }) {
  const names = [...variants.values()].flatMap((variant) => Object.keys(variant.inputs));
  return [ALL, KEY_AND_VALUE, ...new Set([...names, "x"])];
}

/**
 * Adds tensors to those that the user brought, or puts them in the place of an example. An optional
 * input, such as a mask, is added to an example too. A tensor with the name of another one, or for
 * the same inputs, replaces it.
 *
 * @param {Object<string, Object>} added tensors by name
 * @param {Object} state of the page
 * @param {boolean} keepsAll no tensor is replaced: the new one gets another name, or no role
 * @returns {{tensors: Object[], isAdded: boolean, replaced: string[]}} `isAdded`: earlier tensors are
 *   among them; `replaced`: names of those that the user brought and that are not
 */
export function addTensors(added, state, keepsAll = false) {
  const earlier = earlierTensors(added, state);
  const isSame = ({ name }) => !keepsAll && Object.hasOwn(added, name);
  const kept = earlier.filter((entry) => !isSame(entry)).map((entry) => ({ ...entry }));
  const isAlone = !kept.length && Object.keys(added).length === 1;
  const entries = Object.entries(added).map(([name, tensor]) => ({
    name: keepsAll ? freeName(name, earlier) : name,
    role: roleOf(name, earlier.filter(isSame), isAlone, state),
    tensor,
  }));
  giveRoles(entries, kept, state);
  const isUseless = entries.every(({ role }) => role === UNUSED);
  if (isUseless && kept.length && !keepsAll) {
    const { tensors } = addTensors(added, { ...state, tensors: [] });
    return { tensors, isAdded: false, replaced: namesOfUser(earlier) };
  }
  const covered = findCovered(kept, entries);
  if (keepsAll) leaveRoles(entries, covered);
  const dropped = keepsAll ? [] : earlier.filter((one) => isSame(one) || isIn(one, covered));
  const rest = kept.filter((entry) => !isIn(entry, dropped));
  return {
    tensors: [...rest, ...entries].map((entry) => ({ ...entry, isUploaded: !entry.isRandom })),
    isAdded: rest.length > 0,
    replaced: namesOfUser(dropped),
  };
}

/** Returns the names of the tensors that the user brought. */
export const namesOfUser = (entries) =>
  entries.filter(({ isUploaded }) => isUploaded).map(({ name }) => name);

/** Returns the tensors to which others are added: those of the user, or an example's for a mask. */
function earlierTensors(added, { tensors, variant }) {
  const isOptional = Object.keys(added).every((name) => variant.inputs[name]?.optional);
  return tensors.filter(({ isUploaded }) => isUploaded || isOptional);
}

/** Returns the tensors whose every role is also one of the new tensors. */
function findCovered(kept, entries) {
  const roles = entries.flatMap(rolesOf);
  const isCovered = (entry) => rolesOf(entry).every((one) => roles.includes(one));
  return kept.filter((entry) => entry.role !== UNUSED && isCovered(entry));
}

/** Leaves the roles of the user's tensors to them. */
function leaveRoles(entries, covered) {
  const taken = covered.flatMap(rolesOf);
  for (const entry of entries) {
    if (rolesOf(entry).some((one) => taken.includes(one))) entry.role = UNUSED;
  }
}

const rolesOf = ({ role }) => role.split(", ");

const isIn = ({ name }, entries) => entries.some((entry) => entry.name === name);

/** Returns the role that a name tells, or that the tensor of this name had; null without one. */
function roleOf(name, replaced, isAlone, state) {
  const before = replaced.find((entry) => entry.name === name);
  if (before && before.role !== UNUSED) return before.role;
  if (isAlone && canGuess(state)) return name in state.variant.inputs ? name : null;
  if (listRoles(state).includes(name)) return name;
  return isAlone ? null : roleByLetter(name);
}

/** Guesses the role of one of several tensors from its first letter. */
const roleByLetter = (name) =>
  ["query", "key", "value"].find((role) => name.toLowerCase().startsWith(role[0])) ?? null;

const canGuess = ({ variant, layer }) => Boolean(variant.inputs.query) && !layer;

/** Gives roles to the tensors whose names tell none: by their number, or the missing ones. */
function giveRoles(entries, kept, state) {
  for (const entry of kept) {
    // a single tensor had all three roles, whatever its name
    if (entry.role === ALL && !entry.isChosen) entry.role = roleByLetter(entry.name) ?? ALL;
  }
  const nameless = entries.filter(({ role }) => role === null);
  const guessed = [...kept.filter(isGuessed), ...nameless];
  const others = [...kept, ...entries].filter((entry) => !guessed.includes(entry));
  const taken = others.flatMap(rolesOf);
  const isFree = !rolesOf({ role: ALL }).some((one) => taken.includes(one));
  if (nameless.length && canGuess(state) && isFree && guessed.length in GUESSES) {
    guessed.forEach((entry, at) => (entry.role = GUESSES[guessed.length][at]));
    return;
  }
  const known = [...kept, ...entries].filter(({ role }) => role !== null);
  const missing = missingInputs({ ...state, tensors: known });
  for (const entry of nameless) entry.role = missing.shift() ?? UNUSED;
}

/** True if a role follows from the number of tensors: neither the user nor the name tells it. */
const isGuessed = ({ name, role, isChosen }) =>
  !isChosen &&
  Object.values(GUESSES).flat().includes(role) &&
  role !== name &&
  role !== roleByLetter(name);

/** Returns a name that no tensor has: tensor, tensor 2. */
function freeName(name, entries) {
  if (!isIn({ name }, entries)) return name;
  let number = 2;
  while (isIn({ name: `${name} ${number}` }, entries)) number += 1;
  return `${name} ${number}`;
}
