# What only a process that dies can show.
add_executable(frugal_sigkill kill/sigkill.cpp)
frugal_with_torch(frugal_sigkill)
add_test(NAME "kill/sigkill" COMMAND frugal_sigkill 100)
set_tests_properties("kill/sigkill" PROPERTIES LABELS kill TIMEOUT 600 ENVIRONMENT "OMP_NUM_THREADS=1")
