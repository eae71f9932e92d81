# The real demo, interrupted again and again, ends as an undisturbed run does.
find_package(Python3 3.7 COMPONENTS Interpreter QUIET)
if(TARGET example_10_trainer AND Python3_Interpreter_FOUND)
  add_test(NAME "demo/interrupted"
           COMMAND "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/interrupted.py"
                   $<TARGET_FILE:example_10_trainer>)
  set_tests_properties("demo/interrupted" PROPERTIES LABELS demo TIMEOUT 600)
endif()
