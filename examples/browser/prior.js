// SPDX-License-Identifier: Apache-2.0
// A newcomer's label shares from scores without labels: what fedloom.adaptation does in Python (dirichlet.py, checks.py),
// for one client. Arrays of numbers only; a test compares it with Python's.

const STEPS = 50;
const CRITICAL = 5.99; // the 95% point of chi-square with two degrees of freedom
const LEAST = 0.05;

const sum = (values) => values.reduce((a, b) => a + b, 0);

function logSumExp(values) {
  const top = Math.max(...values);
  return top + Math.log(sum(values.map((v) => Math.exp(v - top))));
}

function softmax(values) {
  const all = logSumExp(values);
  return values.map((v) => Math.exp(v - all));
}

export function shares(counts, alpha) {
  const total = sum(counts) + sum(alpha);
  return counts.map((c, k) => (c + alpha[k]) / total);
}

// The classes as a sample sees them: by what the other samples say.
function logWeights(expected, squared, alpha) {
  const number = sum(expected);
  return expected.map((c, k) => {
    const others = Math.max(0, c - squared[k] / Math.max(c, 1e-30));
    return Math.log(alpha[k] + (1 - 1 / Math.max(number, 1)) * others);
  });
}

// EM: {expected, squared} after STEPS passes over the calibrated scores, one row per sample.
export function vote(scores, alpha) {
  let expected = alpha.map(() => 0);
  let squared = alpha.map(() => 0);
  for (let step = 0; step < STEPS; step++) {
    const weights = logWeights(expected, squared, alpha);
    const nextExpected = alpha.map(() => 0);
    const nextSquared = alpha.map(() => 0);
    for (const row of scores) {
      softmax(row.map((s, k) => s + weights[k])).forEach((r, k) => {
        nextExpected[k] += r;
        nextSquared[k] += r * r;
      });
    }
    [expected, squared] = [nextExpected, nextSquared];
  }
  return { expected, squared };
}

// Energy and entropy of the calibrated scores of a sample.
function statistics(row) {
  const all = logSumExp(row);
  return [all, -sum(row.map((s) => Math.exp(s - all) * (s - all)))];
}

// How far the mean statistics are from those of the mixture, in units of their spread.
function misfit(mean, number, mixture, reference) {
  const centre = [0, 1].map((i) => sum(mixture.map((p, k) => p * reference.mean[k][i])));
  const spread = (i, j) =>
    sum(
      mixture.map((p, k) => {
        const off = (at) => reference.mean[k][at] - centre[at];
        return p * (reference.covariance[k][i][j] + off(i) * off(j));
      }),
    ) /
      Math.max(number, 1) +
    sum(mixture.map((p, k) => p * p * reference.unsure[k][i][j])) +
    reference.between[i][j];
  const a = spread(0, 0) * (1 + 1e-4) + 1e-12;
  const d = spread(1, 1) * (1 + 1e-4) + 1e-12;
  const b = spread(0, 1);
  const [x, y] = [0, 1].map((i) => mean[i] - centre[i]);
  const found = (d * x * x - 2 * b * x * y + a * y * y) / Math.max(a * d - b * b, 1e-30);
  return Number.isFinite(found) ? found : 1e12;
}

// From the plain model's scores to what the personal one adds to them: {slope, offset, shares, decision, misfit, weight}.
export function personal(plain, prior) {
  const { alpha, slope, bias, reference, trial } = prior;
  const scores = plain.map((row) => row.map((s, k) => slope * s + bias[k]));
  const { expected } = vote(scores, alpha);
  const all = scores.map(statistics);
  const mean = [0, 1].map((i) => sum(all.map((one) => one[i])) / Math.max(all.length, 1));
  const off = misfit(mean, all.length, shares(expected, alpha), reference);
  const fitting = (CRITICAL / Math.max(off, CRITICAL)) ** 2;
  const left = fitting * sum(expected);
  const misfits = fitting < 1 && left < LEAST * (left + sum(alpha));
  // the federation has tried the correction on itself with as many samples, or fewer and more
  const last = trial.sizes.length - 1;
  const below = Math.max(0, trial.sizes.filter((size) => all.length >= size).length - 1);
  const above = Math.min(last, trial.sizes.filter((size) => all.length > size).length);
  const trust = misfits ? 0 : Math.min(trial.trust[below], trial.trust[above]);
  const weight = fitting * Math.min(1, trial.samples[above] / Math.max(all.length, 1));
  const counts = expected.map((c) => weight * c);
  const found = shares(counts, alpha);
  return {
    slope: trust > 0 ? slope : 1,
    offset: bias.map((b, k) => trust * (b + Math.log(found[k]))),
    shares: found,
    decision: trust === 0 ? "plain" : fitting < 1 || trust < 1 ? "shrunk" : "corrected",
    misfit: off,
    weight,
  };
}

// The personal model's answer for a row of the plain one's scores.
export function answer(row, model) {
  return softmax(row.map((s, k) => model.slope * s + model.offset[k]));
}
