// sources: csrc/ffi/cpu.cc csrc/cpu/*.cc
// sanitizers: thread
// Calls the CPU handlers as XLA does, on a pool of four threads. The results must equal those of
// one thread bit for bit.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "ffi/target.h"

// Stands in for XLA's thread pool, which a handler gets from its execution context.
class Pool {
 public:
  explicit Pool(int threads) : count(threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~Pool() {
    Add([] {}, true);
    for (auto& thread : threads_) thread.join();
  }
  void Add(std::function<void()> task, bool last = false) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    ended_ = last;
    changed_.notify_all();
  }

  const int64_t count;

 private:
  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return ended_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

Pool& PoolOf(void* context) { return *static_cast<Pool*>(context); }

std::string* refusal = nullptr;  // receives a handler's error message if one is expected

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api{};
  api.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) {
    *args->num_threads = PoolOf(args->ctx).count;
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  api.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
    PoolOf(args->ctx).Add([task = args->task, data = args->data] { task(data); });
    return static_cast<XLA_FFI_Error*>(nullptr);
  };
  api.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) -> XLA_FFI_Error* {
    JOF_CHECK(refusal != nullptr, "%s", args->message);
    *refusal = args->message;
    return nullptr;
  };
  return api;
}

struct Array {
  XLA_FFI_DataType type;
  std::vector<int64_t> shape;
  std::vector<char> bytes;
};

template <typename T>
Array MakeArray(XLA_FFI_DataType type, std::vector<int64_t> shape, T (*element)(int64_t)) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  std::vector<char> bytes(static_cast<size_t>(count) * sizeof(T));
  for (int64_t i = 0; i < count; ++i) {
    const T value = element(i);
    std::memcpy(&bytes[static_cast<size_t>(i) * sizeof(T)], &value, sizeof(T));
  }
  return {type, std::move(shape), std::move(bytes)};
}

// Small integers, whose sums are exact.
Array Floats(std::vector<int64_t> shape) {
  return MakeArray<float>(XLA_FFI_DataType_F32, std::move(shape),
                          [](int64_t i) { return static_cast<float>(i * 7 % 11 - 5); });
}

// Ids from below 0 to beyond 1000 rows.
Array Ids(std::vector<int64_t> shape, bool sorted) {
  return MakeArray<int32_t>(
      XLA_FFI_DataType_S32, std::move(shape),
      sorted ? [](int64_t i) { return static_cast<int32_t>(i / 64 - 2); }
             : [](int64_t i) { return static_cast<int32_t>(i * 7919 % 1010 - 5); });
}

using Attributes = std::map<std::string, std::vector<int64_t>>;  // numbers; "name[]" is an array

void Call(jof::Handler* handler, Pool& pool, const std::vector<Array>& operands,
          std::vector<Array>& results, const Attributes& attributes,
          XLA_FFI_ExecutionStage stage = XLA_FFI_ExecutionStage_EXECUTE) {
  std::vector<XLA_FFI_Buffer> buffers;
  for (const auto* arrays : {&operands, static_cast<const std::vector<Array>*>(&results)}) {
    for (const Array& array : *arrays) {
      buffers.push_back(
          {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.type, const_cast<char*>(array.bytes.data()),
           static_cast<int64_t>(array.shape.size()), const_cast<int64_t*>(array.shape.data())});
    }
  }
  std::vector<void*> pointers;
  for (auto& buffer : buffers) pointers.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> arg_types(operands.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(results.size(), XLA_FFI_RetType_BUFFER);

  std::deque<std::string> texts;
  std::deque<XLA_FFI_ByteSpan> names;
  std::deque<XLA_FFI_Scalar> scalars;
  std::deque<XLA_FFI_Array> arrays;
  std::vector<XLA_FFI_ByteSpan*> name_pointers;
  std::vector<void*> values;
  std::vector<XLA_FFI_AttrType> attr_types;
  for (const auto& [key, numbers] : attributes) {
    const bool is_array = key.back() == ']', is_flag = key.back() == '?';
    texts.push_back(key.substr(0, key.find_first_of("[?")));
    names.push_back({texts.back().data(), texts.back().size()});
    name_pointers.push_back(&names.back());
    void* data = const_cast<int64_t*>(numbers.data());
    if (is_array) {
      arrays.push_back({XLA_FFI_DataType_S64, numbers.size(), data});
      values.push_back(&arrays.back());
    } else {
      scalars.push_back({is_flag ? XLA_FFI_DataType_PRED : XLA_FFI_DataType_S64, data});
      values.push_back(&scalars.back());
    }
    attr_types.push_back(is_array ? XLA_FFI_AttrType_ARRAY : XLA_FFI_AttrType_SCALAR);
  }

  static const XLA_FFI_Api api = MakeApi();
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.ctx = reinterpret_cast<decltype(frame.ctx)>(&pool);
  frame.stage = stage;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(operands.size()),
                arg_types.data(), pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(results.size()),
                ret_types.data(), pointers.data() + operands.size()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE,
                 nullptr,
                 static_cast<int64_t>(values.size()),
                 attr_types.data(),
                 name_pointers.data(),
                 values.data()};
  handler(&frame);
}

const jof::Target& Find(const std::string& name) {
  static const std::vector<jof::Target> targets = jof::Targets();
  const auto target = std::find_if(targets.begin(), targets.end(),
                                   [&](const jof::Target& t) { return t.name == name; });
  JOF_CHECK(target != targets.end(), "no target %s", name.c_str());
  return *target;
}

// At instantiation some releases of XLA pass operands and results, and others do not. The handler
// accepts both; here it must only complain of missing attributes.
void TestInstantiate(const std::string& name) {
  Pool pool(1);
  for (const int64_t count : {0, 2}) {
    const std::vector<Array> operands(count, Floats({4}));
    std::vector<Array> results(count, Floats({4}));
    std::string message;
    refusal = &message;
    Call(Find(name).instantiate, pool, operands, results, {}, XLA_FFI_ExecutionStage_INSTANTIATE);
    refusal = nullptr;
    JOF_CHECK(message.find("attributes") != std::string::npos, "%s: %s", name.c_str(),
              message.c_str());
  }
}

// Compares the first `compared` results; the others are scratch.
void Test(const std::string& name, const std::vector<Array>& operands,
          const std::vector<Array>& results, const Attributes& attributes, size_t compared = 1) {
  const jof::Target& target = Find(name);
  std::vector<Array> expected = results;
  Pool one(1), four(4);
  Call(target.execute, one, operands, expected, attributes);
  for (int repetition = 0; repetition < 5; ++repetition) {
    std::vector<Array> found = results;
    Call(target.execute, four, operands, found, attributes);
    for (size_t i = 0; i < compared; ++i) {
      JOF_CHECK(found[i].bytes == expected[i].bytes, "%s: result %ld differs", name.c_str(),
                long(i));
    }
  }
}

int main() {
  TestInstantiate("jof_compiled");
  // Each problem is large enough for several ranges.
  const Attributes upsample{{"axis", {1}}, {"half_pixel?", {0}}};
  Test("jof_upsample_nearest2d", {Floats({8, 60, 50, 4})}, {Floats({8, 120, 100, 4})}, upsample);
  Test("jof_upsample_nearest2d_backward", {Floats({8, 120, 100, 4})}, {Floats({8, 60, 50, 4})},
       upsample);
  Test("jof_permute", {Floats({60, 70, 80})}, {Floats({80, 60, 70})}, {{"axes[]", {2, 0, 1}}});
  const Array flat = Floats({300000});
  Test("jof_tanh", {flat}, {flat}, {{"wanted", {1}}});
  Test("jof_multiply", {flat, Floats({})}, {flat}, {{"wanted", {1}}});
  Test("jof_multiply_vjp", {flat, flat, flat}, {flat, flat}, {{"wanted", {3}}}, 2);
  const Array edges = MakeArray<float>(XLA_FFI_DataType_F32, {40},
                                       [](int64_t i) { return static_cast<float>(i / 4 - 6); });
  const Array places =
      MakeArray<uint32_t>(XLA_FFI_DataType_U32, {300000}, [](int64_t) { return uint32_t{9}; });
  Test("jof_searchsorted", {edges, flat}, {places}, {{"right?", {1}}});
  const Array mask =
      MakeArray<bool>(XLA_FFI_DataType_PRED, {300000}, [](int64_t i) { return i % 3 == 0; });
  Test("jof_where", {mask, flat, flat}, {flat}, {{"wanted", {1}}});
  Test("jof_where_vjp", {mask, flat}, {flat, flat}, {{"wanted", {3}}}, 2);
  const Array wide = MakeArray<double>(XLA_FFI_DataType_F64, {300000}, [](int64_t) { return 0.; });
  Test("jof_cast", {flat}, {wide}, {{"wanted", {1}}});

  const Attributes rule{{"clip?", {0}}, {"wrap?", {0}}};
  Attributes scatter = rule;
  scatter["deterministic?"] = {0};
  const Array none = Floats({0, 0, 0}), updates = Floats({1, 64000, 8}),
              rows = Floats({1, 1000, 8});
  const Array no_order = Ids({0}, true),
              order = MakeArray<int32_t>(XLA_FFI_DataType_S32, {64000},
                                         [](int64_t i) { return static_cast<int32_t>(63999 - i); });
  for (const Array& operand : {none, rows}) {
    for (const Array& by : {no_order, order}) {
      Test("jof_scatter_add_sorted", {operand, updates, Ids({1, 64000}, true), by},
           {rows, Floats({1, 16, 2, 8})}, scatter);
    }
    Test("jof_scatter_add_private", {operand, updates, Ids({1, 64000}, false), no_order},
         {rows, Floats({4, 1, 1000, 8})}, scatter);
  }
  Attributes fill = rule;
  fill["fill[]"] = {0, 0};
  Test("jof_gather_rows", {rows, Ids({1, 64000}, false)}, {updates}, fill);
  Attributes sort = rule;
  sort["size"] = {1000};
  Test("jof_sort_rows", {Ids({1, 64000}, false)}, {Ids({1, 64000}, true), order, Ids({1001}, true)},
       sort, 2);
}
