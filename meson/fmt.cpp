// What fmt's headers leave to one source. LibTorch ships the headers alone.
#include <fmt/format-inl.h>

template auto fmt::detail::dragonbox::to_decimal(float x) noexcept -> decimal_fp<float>;
template auto fmt::detail::dragonbox::to_decimal(double x) noexcept -> decimal_fp<double>;
template auto fmt::detail::decimal_point_impl(locale_ref place) -> char;
template auto fmt::detail::thousands_sep_impl(locale_ref place) -> thousands_sep_result<char>;
