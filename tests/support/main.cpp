// The main function of the Catch2 programs. Catch2 2.13 has none in a library: it is made here.
#if __has_include(<catch2/catch_session.hpp>)
#include <catch2/catch_session.hpp>
#else
#define CATCH_CONFIG_RUNNER
#include <catch2/catch.hpp>
#endif

int main(int count, char* arguments[]) { return Catch::Session().run(count, arguments); }
