/* ort_run MODEL.onnx SHAPE INPUT OUTPUT [LIBRARY]
 *
 * Runs a model with one float32 input in ONNX Runtime. LIBRARY, the path that bnexport.get_library_path()
 * gives, brings the kernels of the nodes that bnexport.export(..., mode="custom_op") keeps. INPUT holds
 * float32 values of the given shape, such as 2,3,32,32; all outputs are written to OUTPUT one after
 * another, and listed. */
#include <stdio.h>
#include <stdlib.h>

#ifdef HAVE_ONNXRUNTIME_HEADER
#include <onnxruntime_c_api.h>
#else
#include "ort_slice.h"
#endif

enum { MAX_RANK = 8 };

static const OrtApi* ort;

static void fail(const char* what, const char* why) {
  fprintf(stderr, "error: %s: %s\n", what, why);
  exit(1);
}

static void check(OrtStatus* status, const char* what) {
  if (status != NULL) fail(what, ort->GetErrorMessage(status));
}

static size_t parse_shape(const char* text, int64_t* shape, size_t* count) {
  size_t rank = 0;
  *count = 1;
  for (const char* rest = text;; ++rest) {
    char* end;
    const long long size = strtoll(rest, &end, 10);
    if (end == rest || size < 0 || rank == MAX_RANK || (*end != ',' && *end != '\0')) {
      fail(text, "expected a shape such as 2,3,32,32");
    }
    shape[rank++] = size;
    *count *= (size_t)size;
    if (*end == '\0') return rank;
    rest = end;
  }
}

static float* read_input(const char* path, size_t count) {
  float* values = malloc(count * sizeof(float) + 1);
  FILE* file = fopen(path, "rb");
  if (values == NULL || file == NULL) fail(path, "cannot be read");
  /* One byte more than fits would show a file that is too long. */
  if (fread(values, 1, count * sizeof(float) + 1, file) != count * sizeof(float)) fail(path, "does not fit the shape");
  fclose(file);
  return values;
}

static void write_output(OrtValue* value, const char* name, FILE* file) {
  OrtTensorTypeAndShapeInfo* info;
  ONNXTensorElementDataType type;
  int64_t shape[MAX_RANK];
  size_t rank, count;
  void* data;
  check(ort->GetTensorTypeAndShape(value, &info), name);
  check(ort->GetTensorElementType(info, &type), name);
  check(ort->GetDimensionsCount(info, &rank), name);
  check(ort->GetTensorShapeElementCount(info, &count), name);
  if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || rank > MAX_RANK) fail(name, "expected float32 of rank 8 at most");
  check(ort->GetDimensions(info, shape, rank), name);
  ort->ReleaseTensorTypeAndShapeInfo(info);
  check(ort->GetTensorMutableData(value, &data), name);
  if (fwrite(data, sizeof(float), count, file) != count) fail(name, "cannot be written");
  printf("%s: [", name);
  for (size_t index = 0; index < rank; ++index) printf(index ? ", %lld" : "%lld", (long long)shape[index]);
  printf("]\n");
}

int main(int argc, char** argv) {
  if (argc < 5 || argc > 6) {
    fprintf(stderr, "usage: ort_run MODEL.onnx SHAPE INPUT OUTPUT [LIBRARY]\n");
    return 2;
  }
  const OrtApiBase* base = OrtGetApiBase();
  ort = base->GetApi(ORT_API_VERSION);
  if (ort == NULL) fail(base->GetVersionString(), "this ONNX Runtime is older than the API that was asked for");

  int64_t shape[MAX_RANK];
  size_t count;
  const size_t rank = parse_shape(argv[2], shape, &count);
  float* values = read_input(argv[3], count);

  OrtEnv* env;
  OrtSessionOptions* options;
  OrtSession* session;
  check(ort->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "ort_run", &env), "ONNX Runtime");
  check(ort->CreateSessionOptions(&options), "ONNX Runtime");
  if (argc == 6) check(ort->RegisterCustomOpsLibrary_V2(options, argv[5]), argv[5]);
  check(ort->CreateSession(env, argv[1], options, &session), argv[1]);

  OrtAllocator* allocator;
  size_t input_count, output_count;
  char* input_name;
  check(ort->GetAllocatorWithDefaultOptions(&allocator), "ONNX Runtime");
  check(ort->SessionGetInputCount(session, &input_count), argv[1]);
  check(ort->SessionGetOutputCount(session, &output_count), argv[1]);
  if (input_count != 1) fail(argv[1], "expected a model with one input");
  check(ort->SessionGetInputName(session, 0, allocator, &input_name), argv[1]);
  char** output_names = calloc(output_count, sizeof *output_names);
  OrtValue** outputs = calloc(output_count, sizeof *outputs);
  if (output_names == NULL || outputs == NULL) fail(argv[1], "out of memory");
  for (size_t index = 0; index < output_count; ++index) {
    check(ort->SessionGetOutputName(session, index, allocator, &output_names[index]), argv[1]);
  }

  OrtMemoryInfo* memory;
  OrtValue* input;
  check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory), "ONNX Runtime");
  check(ort->CreateTensorWithDataAsOrtValue(memory, values, count * sizeof(float), shape, rank,
                                            ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &input),
        argv[3]);
  check(ort->Run(session, NULL, (const char* const*)&input_name, (const OrtValue* const*)&input, 1,
                 (const char* const*)output_names, output_count, outputs),
        argv[1]);

  FILE* file = fopen(argv[4], "wb");
  if (file == NULL) fail(argv[4], "cannot be written");
  for (size_t index = 0; index < output_count; ++index) {
    write_output(outputs[index], output_names[index], file);
    ort->ReleaseValue(outputs[index]);
    check(ort->AllocatorFree(allocator, output_names[index]), "ONNX Runtime");
  }
  if (fclose(file) != 0) fail(argv[4], "cannot be written");

  check(ort->AllocatorFree(allocator, input_name), "ONNX Runtime");
  ort->ReleaseValue(input);
  ort->ReleaseMemoryInfo(memory);
  ort->ReleaseSession(session);
  ort->ReleaseSessionOptions(options);
  ort->ReleaseEnv(env);
  free(outputs);
  free(output_names);
  free(values);
  return 0;
}
