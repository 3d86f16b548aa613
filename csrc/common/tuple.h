// Values of different types side by side: a std::tuple for code that has no standard library
// (NVRTC) or may not use it (see JOF_NAMESPACE_BEGIN).
#pragma once

#include "common/macros.h"

JOF_NAMESPACE_BEGIN

template <typename... T>
struct Tuple {
  static constexpr int kSize = 0;
};

template <typename Head, typename... Tail>
struct Tuple<Head, Tail...> {
  static constexpr int kSize = 1 + sizeof...(Tail);
  Head head;
  Tuple<Tail...> tail;
};

template <int I, typename Head, typename... Tail>
JOF_HOST_DEVICE JOF_INLINE constexpr const auto& Get(const Tuple<Head, Tail...>& tuple) {
  if constexpr (I == 0) {
    return tuple.head;
  } else {
    return Get<I - 1>(tuple.tail);
  }
}

template <int I, typename Head, typename... Tail>
JOF_HOST_DEVICE JOF_INLINE constexpr auto& Get(Tuple<Head, Tail...>& tuple) {
  if constexpr (I == 0) {
    return tuple.head;
  } else {
    return Get<I - 1>(tuple.tail);
  }
}

JOF_HOST_DEVICE JOF_INLINE constexpr Tuple<> MakeTuple() { return {}; }

template <typename Head, typename... Tail>
JOF_HOST_DEVICE JOF_INLINE constexpr Tuple<Head, Tail...> MakeTuple(Head head, Tail... tail) {
  return {head, MakeTuple(tail...)};
}

// The k-th result of a function that returns one value, or a Tuple of several.
template <int k, typename Value>
JOF_HOST_DEVICE JOF_INLINE constexpr Value ResultOf(const Value& result) {
  return result;
}
template <int k, typename... Value>
JOF_HOST_DEVICE JOF_INLINE constexpr auto ResultOf(const Tuple<Value...>& results) {
  return Get<k>(results);
}

// 0, 1, ..., N - 1 as a parameter pack: Indices<...> deduced from MakeIndices<N>.
template <int... I>
struct Indices {};

template <int N, int... I>
struct IndicesUpTo : IndicesUpTo<N - 1, N - 1, I...> {};
template <int... I>
struct IndicesUpTo<0, I...> {
  using type = Indices<I...>;
};

template <int N>
using MakeIndices = typename IndicesUpTo<N>::type;

JOF_NAMESPACE_END
