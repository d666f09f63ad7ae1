// SPDX-License-Identifier: Apache-2.0
// The page: images in, a personal model out. It asks for its own files when it is opened, and for nothing afterwards.

import { answer, personal } from "./prior.js";

const ort = globalThis.ort;
ort.env.wasm.numThreads = 1; // more take headers that a plain file server does not send
ort.env.wasm.wasmPaths = new URL("./ort/", import.meta.url).href;

const element = (id) => document.getElementById(id);
const [prior, session] = await Promise.all([
  fetch("prior.json").then((answer) => answer.json()),
  ort.InferenceSession.create("model.onnx"),
]);
element("files").disabled = false;
element("state").textContent = `Ready for images of ${prior.names.join(", ")}.`;

// An image as numbers, prepared as the federation's were: (channels, height, width).
async function numbers(file) {
  const [channels, height, width] = prior.shape;
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d");
  const bitmap = await createImageBitmap(file);
  context.drawImage(bitmap, 0, 0, width, height);
  const { data } = context.getImageData(0, 0, width, height);
  const found = new Float32Array(channels * height * width);
  for (let place = 0; place < height * width; place++) {
    const [red, green, blue] = data.subarray(4 * place, 4 * place + 3);
    const colours = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue];
    colours.forEach((value, channel) => {
      found[channel * height * width + place] = (value - prior.preparation.mean) / prior.preparation.std;
    });
  }
  return found;
}

async function scoresOf(images) {
  const flat = new Float32Array(images.length * images[0].length);
  images.forEach((image, row) => flat.set(image, row * image.length));
  const x = new ort.Tensor("float32", flat, [images.length, ...prior.shape]);
  const { outputs } = await session.run({ x });
  const width = outputs.dims[1];
  return images.map((_, row) => Array.from(outputs.data.subarray(row * width, (row + 1) * width)));
}

element("files").addEventListener("change", async (event) => {
  const files = [...event.target.files];
  if (!files.length) return;
  const plain = await scoresOf(await Promise.all(files.map(numbers)));
  const model = personal(plain, prior);
  const told = {
    corrected: "The model is corrected with the shares found in your images.",
    shrunk: "The model is corrected with caution: the images fit the classes badly, or it served others only in part.",
    plain: "The model stays as it was: the images do not fit the classes, or the correction did not serve others.",
  };
  element("state").textContent = told[model.decision];
  const ranked = prior.names.map((name, k) => [name, model.shares[k]]).sort((a, b) => b[1] - a[1]);
  element("shares").replaceChildren(...ranked.map(([name, share]) => row([name, `${(100 * share).toFixed(1)}%`])));
  element("answers").replaceChildren(
    ...files.map((file, place) => {
      const [before, after] = [plain[place], answer(plain[place], model)].map((s) => s.indexOf(Math.max(...s)));
      return row([file.name, prior.names[before], prior.names[after]]);
    }),
  );
});

function row(cells) {
  const found = document.createElement("tr");
  for (const text of cells) found.insertCell().textContent = text;
  return found;
}
