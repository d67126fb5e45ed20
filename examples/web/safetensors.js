// Reads a safetensors file: the length of a JSON header (8 bytes, little endian), the header, the data that its
// offsets point into.
import * as ort from "./ort.wasm.min.mjs";

const TYPES = {
  F32: ["float32", Float32Array],
  F64: ["float64", Float64Array],
  I64: ["int64", BigInt64Array],
};

// Tensors by name.
export async function load(url) {
  const buffer = await (await fetch(url)).arrayBuffer();
  const start = 8 + Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(buffer.slice(8, start)));
  delete header.__metadata__;
  return Object.fromEntries(
    Object.entries(header).map(([name, { dtype, shape, data_offsets: [begin, end] }]) => {
      const [type, Values] = TYPES[dtype];
      // A slice is a copy, so that its alignment is that of the type.
      return [name, new ort.Tensor(type, new Values(buffer.slice(start + begin, start + end)), shape)];
    }),
  );
}
